"""Measure what a student learns of an expert that only writes text: the quickstart with one expert behind a server on loopback.

    python -m benchmarks.text_only --quick
    python -m benchmarks.text_only --seeds 0 1 2 --questions exam --json text-only.json

Ways: its answers as text for some steps, and a discriminator's preference; the text of these steps alone; its answers as text in every step;
its log-probs as ever; and the base trained on as many answers as the first asked for, apart from the merge. The headroom is that of this expert's domain alone.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import fmean
from typing import Any

import yaml

from benchmarks.machine import machine
from benchmarks.variants import ROOT, Place, Variant, arguments, make_tiny, merge, opd, place
from experts.registry import Registry
from opd.run.paths import RunPaths
from opd.text import format_or_dash

APART = "as many answers, apart"
PREFERENCE = "preference"
START_S = 240.0
"""Deadline of the server's start."""


def make_variants(args: argparse.Namespace, url: str) -> list[Variant]:
    """The ways in which the merge may learn from the expert."""
    name, steps = args.expert, 1 if args.quick else args.steps
    engine = {"kind": "text", "base_url": url, "model": "expert", "api": "completions"}
    alone = [f"domains.{name}.weight={args.weight}", *(f"domains.{domain}.reward=false" for domain in args.others)]

    def learn(**own: Any) -> list[str]:
        return [
            f"experts.engines={json.dumps({name: engine | own})}",
            f"domains.{name}.objective={{kind: sft}}",
            *alone,
        ]

    preference = {"baseline": args.baseline, "weight": args.reward_weight, "preference": json.loads(args.preference)}
    reward = [f"objective.reward={json.dumps(preference)}", f"rollout.n={args.n}"]
    return [
        Variant(PREFERENCE, (*learn(steps=steps), *reward)),
        Variant("text then nothing", (*learn(steps=steps), f"domains.{name}.reward=false", reward[-1])),
        Variant("text", tuple(learn())),
        Variant("log-probs", tuple(alone[:1])),
    ]


@contextmanager
def serve_expert(model: Path, folder: Path, port: int) -> Iterator[str]:
    """Serve a model under the name `expert`; yields the address. Raises: SystemExit if the server does not come up."""
    command = [sys.executable, "-m", "cli", "serve", str(model), "--port", str(port), "--name", "expert"]
    command += ["--dtype", "float32", "--max-model-len", "48"]
    variables = os.environ | {"PYTHONPATH": str(ROOT), "VLLM_CPU_KVCACHE_SPACE": "1", "OMP_NUM_THREADS": "1"}
    log = folder / "server.log"
    with log.open("w") as output:
        server = subprocess.Popen(command, cwd=folder, env=variables, stdout=output, stderr=subprocess.STDOUT)
        try:
            deadline = time.monotonic() + START_S
            while not _is_up(port):
                if server.poll() is not None or time.monotonic() > deadline:
                    raise SystemExit(f"the server did not start ({log}):\n{log.read_text(errors='replace')[-2000:]}")
                time.sleep(0.5)
            yield f"http://127.0.0.1:{port}/v1"
        finally:
            server.terminate()
            server.wait(30)


def _is_up(port: int) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=2) as answer:
            return bool(answer.status == 200)
    except (urllib.error.URLError, OSError):
        return False


def read_answers(paths: RunPaths, pipeline: Path, cwd: Path, name: str) -> list[dict[str, str]]:
    """The expert's answers in a run, as rows to train on."""
    prompts = yaml.safe_load(pipeline.read_text(encoding="utf-8"))["domains"][name]["prompts"]
    rows = [json.loads(line) for line in (cwd / prompts).read_text(encoding="utf-8").splitlines()]
    asked = [json.loads(line) for line in paths.texts.read_text(encoding="utf-8").splitlines() if line]
    return [
        {"prompt": rows[int(line["prompt_id"].rpartition("/")[2])]["prompt"], "completion": line["text"]}
        for line in asked
        if not line["problem"]
    ]


def train_apart(where: Place, args: argparse.Namespace, seed: int) -> float:
    """Train the base on as many answers as the merge with the discriminator asked for; returns its accuracy."""
    rows = read_answers(where.run(PREFERENCE, seed), where.pipeline, where.cwd, args.expert)
    name, folder = f"apart-{seed}", where.runs
    data = folder / f"{name}.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    student = yaml.safe_load(where.pipeline.read_text(encoding="utf-8"))["student"]["model"]
    spec = {
        "output_dir": str(folder / name),
        "seed": seed,
        "base": {"model": str(where.cwd / student)},
        "train": {"max_steps": 2 if args.quick else 300, "learning_rate": 1.0e-3, "per_device_train_batch_size": 32},
        "experts": {"text": {"domain": args.expert, "data": str(data)}},
    }
    file = folder / f"{name}.yaml"
    file.write_text(yaml.safe_dump(spec, sort_keys=False), encoding="utf-8")
    output = folder / f"{name}-exam.json"
    if not output.exists():
        opd(folder / f"{name}.log", where.cwd, "experts", "train", str(file))
        words = ["evaluate", str(folder / name / "text"), "--pipeline", str(where.pipeline), "--output", str(output)]
        opd(folder / f"{name}.log", where.cwd, *words, "--domains", args.expert)
    return float(json.loads(output.read_text(encoding="utf-8"))["accuracy"][args.expert])


def parse_arguments() -> argparse.Namespace:
    """The options of the command line."""
    parser = arguments("An expert that only writes text, beside its log-probs.")
    add = parser.add_argument
    add("--expert", default="rotate", help="the expert behind the server")
    add("--port", type=int, default=8731, help="port of the server; a comparison goes on with the same one")
    add("--weight", type=float, default=2.0, help="weight of its domain")
    add(
        "--steps", type=int, default=40, help="steps in which its answers are learned as text, before the discriminator"
    )
    add("--n", type=int, default=4, help="responses to a prompt, with the discriminator")
    add("--baseline", default="leave_one_out")
    add("--reward-weight", type=float, default=1.0)
    add("--preference", default="{}", help="objective.reward.preference as JSON")
    add("--only", nargs="*", default=[], help="names of the variants to run; default: all")
    args = parser.parse_args()
    if args.quick:
        args.expert = "reverse"
    return args


def main() -> None:
    args = parse_arguments()
    facts = machine(os.cpu_count() or 1, "torch", "transformers", "vllm", "deepspeed", "ray")
    figures: dict[str, dict[int, dict[str, Any]]] = {}
    with place(args, make_tiny) as where:
        data = yaml.safe_load(where.pipeline.read_text(encoding="utf-8"))
        args.others = [domain for domain in data["domains"] if domain != args.expert]
        model = Path(Registry(where.cwd / data["registry"]).get(args.expert).model)
        with serve_expert(model, where.runs, args.port) as url:
            for seed in args.seeds:
                for variant in make_variants(args, url):
                    if not args.only or variant.name in args.only:
                        figures.setdefault(variant.name, {})[seed] = measure(where, variant, seed, args)
                        save(args, facts, figures)
                if not args.only or APART in args.only:
                    reference = figures[PREFERENCE][seed]
                    accuracy = train_apart(where, args, seed)
                    figures.setdefault(APART, {})[seed] = add_headroom({**reference, "after": accuracy})
                    save(args, facts, figures)
    show(figures, args)


def measure(where: Place, variant: Variant, seed: int, args: argparse.Namespace) -> dict[str, Any]:
    """Merge, and return what the expert's domain came to, and the calls."""
    outcome = merge(where, variant, seed, args.set)
    report = json.loads(where.run(variant.name, seed).report.read_text(encoding="utf-8"))
    spent = report.get("texts", {}).get(args.expert, {})
    return add_headroom(
        {
            **{exam: outcome.accuracy[exam][args.expert] for exam in ("before", "expert", "after")},
            "mean_headroom": outcome.mean_headroom,
            "calls": spent.get("calls", 0),
            "answer_tokens": spent.get("completion_tokens", 0),
            "wall_s": outcome.wall_s,
            "settings": list(variant.settings),
        }
    )


def add_headroom(figures: dict[str, Any]) -> dict[str, Any]:
    """Add the share of the way to the expert."""
    gap = figures["expert"] - figures["before"]
    return figures | {"headroom": (figures["after"] - figures["before"]) / gap if gap > 0 else None}


def save(args: argparse.Namespace, facts: Any, figures: Any) -> None:
    """Write what is known so far."""
    if args.json:
        data = {"machine": facts, "expert": args.expert, "questions": args.questions, "ways": figures}
        args.json.write_text(json.dumps(data, indent=2) + "\n", encoding="utf-8")


def show(figures: dict[str, dict[int, dict[str, Any]]], args: argparse.Namespace) -> None:
    """A line for each way."""
    print(f"domain {args.expert}, on {args.questions} questions")
    for name, by_seed in figures.items():
        known: Sequence[float] = [f["headroom"] for f in by_seed.values() if f["headroom"] is not None]
        after, calls = fmean(f["after"] for f in by_seed.values()), fmean(f["calls"] for f in by_seed.values())
        headroom = format_or_dash(fmean(known) if known else None, ".3f")
        print(f"{name:24} accuracy {after:.3f}  headroom {headroom}  calls {calls:.0f}  of {len(by_seed)} seeds")


if __name__ == "__main__":
    sys.exit(main())
