"""Three efforts of three tasks in one student: does more effort write more, and is it no worse? Beside it: `extrapolate` below 1.

    python -m benchmarks.efforts --quick
    python -m benchmarks.efforts --seeds 0 1 2 --json efforts.json

An answer takes eight steps, and may show none of them (`low`), every second (`high`), or all (`max`). The base has read all three forms,
and chooses one at random. The experts of `lift` come from reinforcement with a budget of tokens (docs/efforts.md#experts), the others from
texts of their form. No expert reads the tag of the effort; the student does.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from string import ascii_lowercase
from typing import Any

import yaml

from benchmarks.machine import machine
from benchmarks.variants import Variant, carry_out, given, opd, open_world
from opd.environments.game import take_unique

EVERY = {"low": 0, "high": 2, "max": 1}
"""Effort -> of how many steps one is written; 0: none."""
BUDGETS = {"low": 3, "high": 8, "max": None}
"""Effort -> most tokens of a response that reinforcement rewards: what a form has, and one more."""
OPERATIONS = 8
REINFORCED = "lift"
VARIANTS = (
    Variant("efforts", ()),
    Variant("extrapolate 0.5", ("objective.extrapolate=0.5",)),
    Variant("extrapolate 0.25", ("objective.extrapolate=0.25",)),
)
Task = Callable[[random.Random], tuple[str, list[str]]]
"""Function that draws a question and its steps, the last of which is the answer."""


@dataclass(frozen=True)
class Size:
    """Amount of everything."""

    rows: int
    base_steps: int
    expert_steps: int
    rl_steps: int
    steps: int
    samples: int

    def model(self) -> dict[str, int]:
        """The base's size: that of the quickstart, or a tiny one."""
        width, layers = (128, 4) if self.steps > 10 else (64, 2)
        size = {"hidden_size": width, "layers": layers, "heads": width // 32, "intermediate_size": 2 * width}
        return {**size, "max_position_embeddings": 64}


FULL = Size(rows=8000, base_steps=700, expert_steps=120, rl_steps=30, steps=800, samples=108)
QUICK = Size(rows=60, base_steps=2, expert_steps=2, rl_steps=2, steps=2, samples=18)


def draw_lift(rng: random.Random) -> tuple[str, list[str]]:
    """Ride between ten floors, of which the last is below the first: one up (u), one down (d), or to the first (g)."""
    floor, moves = rng.randrange(10), rng.choices("uuddg", k=OPERATIONS)
    start, floors = floor, []
    for move in moves:
        floor = 0 if move == "g" else (floor + (1 if move == "u" else -1)) % 10
        floors.append(str(floor))
    return f"lft {start}{''.join(moves)}=", floors


def draw_walk(rng: random.Random) -> tuple[str, list[str]]:
    """Go through ten letters in a circle: one on (>), one back (<), or to the first (.)."""
    place, signs = rng.randrange(10), rng.choices(">><<.", k=OPERATIONS)
    start, letters = place, []
    for sign in signs:
        place = 0 if sign == "." else (place + (1 if sign == ">" else -1)) % 10
        letters.append(ascii_lowercase[place])
    return f"wlk {ascii_lowercase[start]}{''.join(signs)}=", letters


def draw_cups(rng: random.Random) -> tuple[str, list[str]]:
    """Follow a ball under three cups: two change places (x, y, z), or somebody puts the ball under the first (p)."""
    ball, names = rng.choice("abc"), rng.choices("xxyyzzpp", k=OPERATIONS)
    start, places = ball, []
    for name in names:
        first, second = SWAPS.get(name, ("", ""))
        ball = "a" if name == "p" else {first: second, second: first}.get(ball, ball)
        places.append(ball)
    return f"cup {start}{''.join(names)}=", places


SWAPS = {"x": ("a", "b"), "y": ("b", "c"), "z": ("a", "c")}
"""Cups that change places."""
TASKS: dict[str, Task] = {REINFORCED: draw_lift, "walk": draw_walk, "cup": draw_cups}


def write_answer(steps: Sequence[str], effort: str) -> str:
    """Return an answer in the form of an effort; its last line is the result."""
    every = EVERY[effort]
    return "".join([*steps[every - 1 :: every], "\n"] if every else []) + steps[-1]


def draw_questions(domain: str, count: int) -> list[tuple[str, list[str]]]:
    """Return different questions with their steps."""
    rng = random.Random(f"efforts/{domain}")
    draws = (TASKS[domain](rng) for _ in range(10 * count))
    drawn = ({"prompt": prompt, "steps": steps} for prompt, steps in draws)
    return [(row["prompt"], row["steps"]) for row in take_unique(drawn, count, domain)]


def write_rows(file: Path, questions: Sequence[tuple[str, list[str]]], efforts: Sequence[str]) -> str:
    """Write each question with an answer, of these efforts in turn; returns the file's name."""
    rows = [
        {"prompt": prompt, "completion": write_answer(steps, efforts[i % len(efforts)]), "answer": steps[-1]}
        for i, (prompt, steps) in enumerate(questions)
    ]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(file)


def make_world(folder: Path, size: Size) -> Path:
    """Write the questions, train the base and nine experts, and return the pipeline."""
    mixed, exams = {}, {}
    texts = {}
    for domain in TASKS:
        questions = draw_questions(domain, size.rows)
        exam, train = questions[: size.rows // 10], questions[size.rows // 10 :]
        exams[domain] = write_rows(folder / f"{domain}-exam.jsonl", exam, ["max"])
        mixed[domain] = write_rows(folder / f"{domain}.jsonl", train, list(EVERY))
        for effort in EVERY:
            texts[domain, effort] = write_rows(folder / f"{domain}-{effort}.jsonl", train, [effort])
    train_on_texts(folder, size, list(mixed.values()), texts)
    train_by_rewards(folder, size, mixed[REINFORCED], exams[REINFORCED])
    pipeline = {
        "name": "efforts",
        "student": {"model": str(folder / "models" / "base")},
        "efforts": {effort: {"text": f"{effort} "} for effort in EVERY},
        "experts": {
            f"{domain}-{effort}": {
                "model": str(folder / "models" / f"{domain}-{effort}"),
                "domain": domain,
                "effort": effort,
                "prompt": {"effort": False},
            }
            for domain in TASKS
            for effort in EVERY
        },
        "domains": {
            domain: {"prompts": mixed[domain], "eval": {"prompts": exams[domain], "verifier": "last_line"}}
            for domain in TASKS
        },
        "rollout": {"max_new_tokens": 14, "max_model_len": 40},
        "objective": {"kind": "reverse_kl", "normalize": "sequence_mean"},  # else long answers have most of the loss
        "balance": {"kind": "gap"},  # answers without thoughts are learned last
        "trainer": {
            "ranks": 1,
            "steps": size.steps,
            "samples_per_step": size.samples,
            "lr": 2.0e-3,
            "warmup_steps": 10,
            "lr_scheduler_type": "cosine",
        },
        "evaluate": {"samples": 300},
    }
    return write_yaml(folder / "pipeline.yaml", pipeline)


def train_on_texts(folder: Path, size: Size, mixed: list[str], texts: dict[tuple[str, str], str]) -> None:
    """Train the base on all forms, and an expert on each form of each task but one."""
    settings = {"learning_rate": 2.0e-3, "per_device_train_batch_size": 64, "max_length": 40}
    spec = {
        "output_dir": str(folder / "models"),
        "base": {
            "from_scratch": {"tokenizer": "letters", **size.model()},
            "data": mixed,
            "train": {**settings, "max_steps": size.base_steps},
        },
        "train": {**settings, "max_steps": size.expert_steps, "learning_rate": 1.0e-3},
        "experts": {
            f"{domain}-{effort}": {"domain": domain, "data": file}
            for (domain, effort), file in texts.items()
            if domain != REINFORCED
        },
    }
    opd(folder / "texts.log", folder, "experts", "train", str(write_yaml(folder / "texts.yaml", spec)))


def train_by_rewards(folder: Path, size: Size, prompts: str, exam: str) -> None:
    """Train an expert for each effort by reinforcement: what is right and within the budget earns 1, what is longer -1."""
    spec = {
        "output_dir": str(folder / "models"),
        "runs": str(folder / "reinforcement"),
        "base": {"model": str(folder / "models" / "base")},
        "method": "grpo",
        "rollout": {"max_new_tokens": 14, "max_model_len": 40},
        "trainer": {
            "ranks": 1,
            "steps": size.rl_steps,
            "samples_per_step": 128 if size.steps > 10 else 16,
            "lr": 5.0e-4,
        },
        "evaluate": {"samples": 300},
        "experts": {
            f"{REINFORCED}-{effort}": {
                "domain": REINFORCED,
                "prompts": prompts,
                "eval": {"prompts": exam, "verifier": "last_line"},
                "reward": {} if budget is None else {"budget": {"tokens": budget}},
            }
            for effort, budget in BUDGETS.items()
        },
    }
    opd(folder / "rewards.log", folder, "experts", "train", str(write_yaml(folder / "rewards.yaml", spec)))


def write_yaml(file: Path, data: dict[str, Any]) -> Path:
    """Write a file of settings; returns it."""
    file.write_text(yaml.safe_dump(data, sort_keys=False), encoding="utf-8")
    return file


def main() -> None:
    parser = argparse.ArgumentParser(description="Three efforts of three tasks in one student.")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0])
    parser.add_argument("--folder", type=Path, default=Path("runs/efforts"), help="models, run directories and logs")
    parser.add_argument("--json", type=Path, help="write all figures here, after every merge")
    parser.add_argument("--quick", action="store_true", help="a tiny base and two steps: does everything run?")
    args = parser.parse_args()
    facts = machine(os.cpu_count() or 1, "torch", "transformers", "deepspeed", "ray")
    merges: list[dict[str, Any]] = []
    size = QUICK if args.quick else FULL
    with open_world(None if args.quick else args.folder, lambda folder: make_world(folder, size)) as where:
        for seed in args.seeds:
            for variant in VARIANTS[:1] if args.quick else VARIANTS:
                paths = where.run(variant.name, seed)
                carry_out(where, paths, [str(where.pipeline), *given(seed, variant.settings)])
                report = json.loads(paths.report.read_text(encoding="utf-8"))
                merges.append({"variant": variant.name, "seed": seed, "wall_s": report["wall_s"], **report["efforts"]})
                show(merges[-1])
                if args.json:
                    args.json.write_text(
                        json.dumps({"machine": facts, "merges": merges}, indent=2) + "\n", encoding="utf-8"
                    )


def show(merge: dict[str, Any]) -> None:
    """Print a merge's efforts, and which of them break the order."""
    print(f"{merge['variant']}, seed {merge['seed']}, {merge['wall_s']:.0f} s")
    for row in merge["rows"]:
        numbers = [row[f"{key}{unit}"] for unit in ("_tokens", "") for key in ("before", "expert", "after")]
        print(f"  {row['name']:10} tokens {numbers[0]:5.1f} {numbers[1]:5.1f} {numbers[2]:5.1f}", end="")
        print(f"  right {numbers[3]:.3f} {numbers[4]:.3f} {numbers[5]:.3f}  loss at ends {row['end_loss']:.4f}")
    print("\n".join(f"  {line}" for line in merge["falls"]) or "  longer with the effort, and right no less often")


if __name__ == "__main__":
    sys.exit(main())
