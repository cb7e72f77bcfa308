"""Is `opd plan` right? Short merges in four settings, beside what the plan says of them. Never a verdict.

    python -m benchmarks.plan quickstart --folder DIR --json FILE     DIR: where `make demo` has made models and prompts
    python -m benchmarks.plan smollm2 --folder DIR --json FILE        DIR: where `make smollm2` has
    python -m benchmarks.plan tiny --json FILE                        the merges that the overheads of two-cores come from
    python -m benchmarks.plan recorded                                no merge: docs/results/plan.json as rows of docs/plan.md

Rates are those of a matrix product and a copy on this machine, measured before the first merge and after the last. Lengths are
those that the merge's own records show. Nothing else is taken from what is compared.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shlex
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.machine import machine

PHASES = ("rollout", "score", "train", "sync")
SETTINGS: dict[str, tuple[tuple[str, ...], ...]] = {
    "quickstart": (
        (),
        ("trainer.samples_per_step=80",),
        ("trainer.ranks=1",),
        ("rollout.dtype=bfloat16", "teachers.dtype=bfloat16", "trainer.dtype=bfloat16"),
    ),
    "smollm2": (
        (),
        ("trainer.samples_per_step=20",),
        ("trainer.ranks=1",),
        ("rollout.dtype=float32", "teachers.dtype=float32", "trainer.dtype=float32", "trainer.samples_per_step=20"),
    ),
    "tiny": (
        ("rollout.max_new_tokens=8", "trainer.samples_per_step=4"),
        ("rollout.max_new_tokens=8", "trainer.samples_per_step=128"),
        ("rollout.max_new_tokens=32", "trainer.samples_per_step=4"),
        ("rollout.max_new_tokens=8", "trainer.samples_per_step=128", "trainer.micro_batch_tokens=256"),
        ("rollout.max_new_tokens=8", "trainer.samples_per_step=128", "trainer.ranks=2"),
        ("rollout.max_new_tokens=32", "trainer.samples_per_step=128"),
    ),
}
"""Pipeline -> what each of its merges changes."""
WARM_UP, STEPS = 2, 6
"""First steps of a merge, which do not count, and steps that do."""
RECORDED = Path(__file__).resolve().parents[1] / "docs/results/plan.json"
TOLERANCE = 0.3
QUANTILES = 199


def predicted(run: Mapping[str, Any], rates: Mapping[str, float], folder: Path | None = None) -> dict[str, float]:
    """Seconds of each phase and of a step, by the plan, for a measured merge. Model paths are relative to `folder`."""
    from opd.config import PipelineConfig
    from pipelines.plan.plan import make_plan
    from pipelines.plan.spec import ClusterSpec, load_spec

    config = PipelineConfig.model_validate(run["pipeline"])
    data = load_spec("two-cores").model_dump()
    machine = data["machine"] | {"cores": run["cores"]}
    spec = ClusterSpec.model_validate(data | {"rates": dict(rates), "lengths": run["lengths"], "machine": machine})
    here = Path.cwd()
    os.chdir(folder or here)
    try:
        plan = make_plan(config, spec)
    finally:
        os.chdir(here)
    return {phase.name: phase.seconds for phase in plan.phases} | {"step": plan.step_s}


def lengths_of(records: Sequence[Mapping[str, Any]], limit: int) -> dict[str, float]:
    """Prompt, median and tail of the lognormal lengths, cut at the limit, that have a merge's own mean and median."""
    rows = sum(sum(record["prompts"].values()) for record in records)
    mean = sum(record["response_tokens"] for record in records) / rows
    prompt = sum(record["prompt_tokens"] for record in records) / rows
    if sum(record["truncated"] for record in records) >= rows / 2:
        return {"prompt": round(prompt), "response": float(limit), "tail": 1.0}
    median = min(_median(records, rows), mean)
    low, high = 0.0, 4.0
    for _ in range(40):
        sigma = (low + high) / 2
        low, high = (sigma, high) if _mean(median, sigma, limit) < mean else (low, sigma)
    return {"prompt": round(prompt), "response": round(median, 2), "tail": round(math.exp(2.3263 * low), 2)}


def _median(records: Sequence[Mapping[str, Any]], rows: int) -> float:
    """Tokens that half of the responses reach, between the places that records count."""
    before, place = 1.0, 0.0
    counts: dict[str, int] = {}
    for record in records:
        for name, found in record["positions"].items():
            counts[name] = counts.get(name, 0) + found["tokens"]
    for name in sorted(counts, key=lambda one: int(one.split("-")[0])):
        first, _, last = name.partition("-")
        middle = (int(first) + int(last or first)) / 2 + 1
        there = counts[name] / rows / (int(last or first) - int(first) + 1)
        if there < 0.5:
            return place + (middle - place) * (before - 0.5) / (before - there)
        before, place = there, middle
    return place


def _mean(median: float, sigma: float, limit: int) -> float:
    normal = statistics.NormalDist()
    quantiles = (normal.inv_cdf((i + 1) / (QUANTILES + 1)) for i in range(QUANTILES))
    return statistics.fmean(min(limit, max(1, round(median * math.exp(sigma * z)))) for z in quantiles)


def take(pipeline: str, changes: Sequence[str], folder: Path) -> dict[str, Any]:
    """One merge: its settings, its lengths, and the medians of its phases."""
    import yaml

    with tempfile.TemporaryDirectory(prefix="opd-plan-") as scratch:
        run = Path(scratch) / "run"
        always = (f"trainer.steps={WARM_UP + STEPS}", "evaluate.every=0", "logging.tensorboard=false")
        sets = [part for change in (*always, *changes) for part in ("--set", change)]
        command = [sys.executable, "-m", "cli", "merge", pipeline, "--run-dir", str(run), *sets]
        environment = os.environ | {"PYTHONPATH": str(Path(__file__).resolve().parents[1])}
        subprocess.run(command, cwd=folder, env=environment, check=True, timeout=3600, stdout=subprocess.DEVNULL)
        records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        config = yaml.safe_load((run / "pipeline.yaml").read_text())
    return summary(config, records[WARM_UP:], ["opd", *command[3:5], *sets])


def summary(config: Mapping[str, Any], records: Sequence[Mapping[str, Any]], command: Sequence[str]) -> dict[str, Any]:
    """What is kept of a merge."""
    from opd.config import PipelineConfig

    phases = {name: statistics.median(record["phase_s"].get(name, 0.0) for record in records) for name in PHASES}
    return {
        "command": shlex.join(command),
        "pipeline": PipelineConfig.model_validate(config).model_dump(mode="json", exclude_defaults=True),
        "lengths": lengths_of(records, config["rollout"]["max_new_tokens"]),
        "cores": len(os.sched_getaffinity(0)),
        "steps": len(records),
        "phase_s": phases | {"step": statistics.median(sum(r["phase_s"].get(n, 0.0) for n in PHASES) for r in records)},
    }


def compared(measured: Mapping[str, Any], folder: Path | None = None) -> list[tuple[str, ...]]:
    """Setting, phase, measured, planned, and how far off the plan is, for each phase and the whole step."""
    rows = []
    for run in measured["runs"]:
        plan = predicted(run, measured["rates"], folder)
        for name, seconds in run["phase_s"].items():
            off = plan[name] / seconds - 1
            rows.append((run["command"], name, f"{seconds:.3g}", f"{plan[name]:.3g}", f"{off:+.0%}"))
    return rows


def tiny_merge(folder: Path) -> Path:
    """A pipeline of a tiny model of random weights and two experts, whose work is nothing beside its overheads."""
    import yaml

    from benchmarks.merging.inputs import Order

    order = Order(
        folder=str(folder), model_dir=None, tiny=True, dtypes=["float32"], experts=2, prompts=600, prompt_tokens=8
    )
    command = [sys.executable, "-m", "benchmarks.merging.inputs", order.to_json()]
    subprocess.run(command, check=True, timeout=600, cwd=Path(__file__).resolve().parents[1])
    experts = {f"e{i}": {"model": f"float32/expert-{i:02}", "domain": f"d{i}"} for i in range(2)}
    data = {
        "name": "tiny",
        "student": {"model": "float32/student"},
        "experts": experts,
        "domains": {f"d{i}": {"prompts": f"prompts/domain-{i:02}.jsonl"} for i in range(2)},
        "rollout": {"max_model_len": 64},
        "trainer": {"ranks": 1, "steps": 1, "samples_per_step": 4},
    }
    file = folder / "tiny.yaml"
    file.write_text(yaml.safe_dump(data))
    return file


def recorded(folder: Path) -> list[str]:
    """Rows of docs/plan.md for the merges of docs/results/plan.json; `folder` is empty, and gets the tiny model's shape."""
    from benchmarks.merging.inputs import TINY

    shape = json.dumps({"model_type": "llama", "tie_word_embeddings": True, **TINY})
    for name in ("student", "expert-00", "expert-01"):
        (folder / "float32" / name).mkdir(parents=True)
        (folder / "float32" / name / "config.json").write_text(shape)
    rows = []
    for merge in sorted(json.loads(RECORDED.read_text(encoding="utf-8")), key=lambda one: bool(one["overheads"])):
        found = compared({"rates": merge["rates"], "runs": [merge]}, folder)
        rows += [f"| {' | '.join((merge['name'], *row[1:]))} |" for row in found]
    return rows


def measure(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """All settings of a pipeline, and the machine's rates around them."""
    from pipelines.plan.measure import measured_spec
    from pipelines.plan.spec import load_spec

    pipeline = tiny_merge(folder).name if args.pipeline == "tiny" else args.pipeline
    base = load_spec("two-cores")
    rates = [measured_spec(base).rates.model_dump()]
    runs = []
    for number, changes in enumerate(SETTINGS[args.pipeline]):
        if args.settings is None or number in args.settings:
            runs.append(take(pipeline, changes, folder))
            print(runs[-1]["command"], runs[-1]["phase_s"], runs[-1]["lengths"], file=sys.stderr)
    rates.append(measured_spec(base).rates.model_dump())
    mean = {name: statistics.fmean(one[name] for one in rates) for name in rates[0]}
    facts = machine(len(os.sched_getaffinity(0)), "torch", "transformers", "deepspeed", "ray")
    return {"machine": facts | {"load_after": os.getloadavg()}, "rates": mean, "runs": runs}


def main() -> None:
    parser = argparse.ArgumentParser(description="Short merges beside what `opd plan` says of them; never a verdict.")
    parser.add_argument("pipeline", choices=[*SETTINGS, "recorded"])
    parser.add_argument("--folder", type=Path, default=Path(), help="where the pipeline's relative paths begin")
    parser.add_argument("--settings", nargs="+", type=int, help="numbers of the settings, from 0; default: all")
    parser.add_argument("--json", type=Path, help="write what was measured here")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="opd-plan-") as scratch:
        if args.pipeline == "recorded":
            print("\n".join(recorded(Path(scratch))))
            return
        folder = Path(scratch) if args.pipeline == "tiny" else args.folder
        measured = measure(args, folder)
        if args.json:
            args.json.write_text(json.dumps(measured, indent=2) + "\n", encoding="utf-8")
        from pipelines.commands.shell import print_table

        print_table(
            "the plan beside the merge", ("merge", "phase", "measured", "planned", "off"), compared(measured, folder)
        )
    print(measured["machine"], measured["rates"])


if __name__ == "__main__":
    main()
