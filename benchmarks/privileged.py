"""Measure the worth of a solution that only the teacher reads. The student is its own teacher; three controls on as many responses.

    python -m benchmarks.privileged --quick
    python -m benchmarks.privileged --seeds 0 1 2 --json privileged.json

The base has learned to answer `qkxh rev hxkq=` with the word in front, and nothing about `rev hxkq=` alone. In the merge the teacher
reads the solution in front, the student does not (docs/teacher_prompts.md). The controls: a teacher without the solution, one with
another row's solution, and training on the solutions as text. Accuracy is on words that nobody trains on.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import yaml

from benchmarks.machine import machine
from benchmarks.variants import Place, Variant, merge, opd, open_world
from experts.suites.letters import make_rows
from opd.text import format_or_dash

TEMPLATE = "{% for message in messages %}{{ message.content }}{% endfor %}"
TEXT = "solutions as text"
VARIANTS = (
    Variant("solution", ()),
    Variant("no context", ("experts.told.prompt=null",)),
    Variant("unrelated solution", ('experts.told.prompt.system="{{ row.unrelated }} "',)),
)
PIPELINE = "pipeline.yaml"


@dataclass(frozen=True)
class Size:
    """Amount of everything."""

    rows: int
    base_steps: int
    steps: int
    samples: int

    def model(self) -> dict[str, int]:
        """The base's size: that of the quickstart, or a tiny one."""
        width, layers = (128, 4) if self.steps > 10 else (64, 2)
        return {
            "hidden_size": width,
            "layers": layers,
            "heads": width // 32,
            "intermediate_size": 2 * width,
            "max_position_embeddings": 64,
        }


FULL = Size(rows=4000, base_steps=400, steps=300, samples=120)
QUICK = Size(rows=60, base_steps=2, steps=2, samples=8)


def write_rows(file: Path, rows: Sequence[dict[str, Any]]) -> str:
    """Write JSONL; returns its name."""
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(file)


def make_world(folder: Path, size: Size) -> Path:
    """Write prompts, train the base, and return the pipeline."""
    rows = make_rows("reverse", 2 * size.rows, 0)
    shown, hidden = rows[: size.rows], rows[size.rows :]
    base_rows = [{**row, "prompt": f"{row['completion']} {row['prompt']}"} for row in shown]
    told = [
        {**row, "solution": row["completion"], "unrelated": other["completion"]}
        for row, other in zip(hidden, [*hidden[1:], hidden[0]], strict=True)
    ]
    held_out = len(told) // 10
    train, exam = (
        write_rows(folder / "train.jsonl", told[held_out:]),
        write_rows(folder / "exam.jsonl", told[:held_out]),
    )
    base_data = write_rows(folder / "base.jsonl", base_rows)
    (folder / "join.jinja").write_text(TEMPLATE, encoding="utf-8")
    train_settings = {"max_steps": size.base_steps, "learning_rate": 2.0e-3, "per_device_train_batch_size": 64}
    spec = {
        "output_dir": str(folder / "models"),
        "base": {"from_scratch": {"tokenizer": "letters", **size.model()}, "data": [base_data]},
        "train": train_settings,
        "experts": {"copy": {"domain": "reverse", "data": base_data, "train": {"max_steps": 1}}},
    }
    train_models(folder, "base", spec)
    pipeline = {
        "name": "told",
        "student": {"model": str(folder / "models" / "base")},
        "experts": {
            "told": {
                "model": "student",
                "domain": "reverse",
                "prompt": {
                    "system": "{{ row.solution }} ",
                    "template": str(folder / "join.jinja"),
                    "max_model_len": 40,
                },
            }
        },
        "domains": {"reverse": {"prompts": train, "eval": {"prompts": exam}}},
        "rollout": {"max_new_tokens": 8, "max_model_len": 32},
        "trainer": {"ranks": 1, "steps": size.steps, "samples_per_step": size.samples, "lr": 1.5e-3},
        "evaluate": {"samples": 300},
    }
    file = folder / PIPELINE
    file.write_text(yaml.safe_dump(pipeline, sort_keys=False), encoding="utf-8")
    return file


def train_models(folder: Path, name: str, spec: dict[str, Any]) -> None:
    """Carry out a training spec."""
    file = folder / f"{name}.yaml"
    file.write_text(yaml.safe_dump(spec, sort_keys=False), encoding="utf-8")
    opd(folder / f"{name}.log", folder, "experts", "train", str(file))


def train_on_text(where: Place, size: Size, seed: int) -> float:
    """Train the base on as many solutions as the merges have responses; returns its accuracy."""
    folder, name = where.cwd, f"text-{seed}"
    spec = {
        "output_dir": str(folder / name),
        "seed": seed,
        "base": {"model": str(folder / "models" / "base")},
        "train": {
            "max_steps": size.steps,
            "learning_rate": 1.5e-3,
            "per_device_train_batch_size": size.samples,
        },
        "experts": {"text": {"domain": "reverse", "data": str(folder / "train.jsonl")}},
    }
    train_models(folder, name, spec)
    output = folder / f"{name}.json"
    words = ["evaluate", str(folder / name / "text"), "--pipeline", str(where.pipeline), "--output", str(output)]
    opd(folder / f"{name}.log", folder, *words)
    return float(json.loads(output.read_text(encoding="utf-8"))["accuracy"]["reverse"])


def main() -> None:
    parser = argparse.ArgumentParser(description="A teacher that alone reads the solution, beside three controls.")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0])
    parser.add_argument("--folder", type=Path, default=Path("runs/privileged"), help="models, run directories and logs")
    parser.add_argument("--json", type=Path, help="write all figures here, after every model")
    parser.add_argument("--quick", action="store_true", help="a tiny base and two steps: does everything run?")
    args = parser.parse_args()
    facts = machine(os.cpu_count() or 1, "torch", "transformers", "deepspeed", "ray")
    accuracy: dict[str, dict[int, float]] = {}
    tokens: dict[str, dict[int, int]] = {}
    size = QUICK if args.quick else FULL
    with open_world(None if args.quick else args.folder, lambda folder: make_world(folder, size)) as where:
        for seed in args.seeds:
            for variant in VARIANTS:
                outcome = merge(where, variant, seed, [])
                accuracy.setdefault("before", {})[seed] = outcome.accuracy["before"]["reverse"]
                accuracy.setdefault(variant.name, {})[seed] = outcome.accuracy["after"]["reverse"]
                tokens.setdefault(variant.name, {})[seed] = outcome.tokens
                save(args.json, facts, accuracy, tokens)
            accuracy.setdefault(TEXT, {})[seed] = train_on_text(where, size, seed)
            save(args.json, facts, accuracy, tokens)
    for name, by_seed in accuracy.items():
        values = list(by_seed.values())
        spread = stdev(values) if len(values) > 1 else None
        print(
            f"{name:20} accuracy {fmean(values):.3f}  deviation {format_or_dash(spread, '.3f')}  of {len(values)} seeds"
        )


def save(file: Path | None, facts: Any, accuracy: Any, tokens: Any) -> None:
    """Write what is known so far."""
    if file is not None:
        data = {"machine": facts, "accuracy": accuracy, "trained_tokens": tokens}
        file.write_text(json.dumps(data, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
