"""Measure what writing one step ahead gains and costs: `sync` against `one_step_off`, each role on cores of its own.

    python benchmarks/schedules.py --json schedules.json

A base and two experts are trained on letter tasks. Then the same merge runs in both schedules and with two seeds, in turn.
In every run the rollout engine has one half of the machine's cores, teachers and trainer the other half, and each as many
threads: so both schedules have the same machine, and only one of them uses both halves at a time.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil
import yaml
from machine import PACKAGES, machine

ROOT = Path(__file__).resolve().parents[1]
DOMAINS = ("reverse", "double")
MODES = ("sync", "one_step_off")
LOG_LINES = 20
"""Last lines of a command that fails, which are shown."""
ENGINE, OTHERS = ("ray::VLLMWorker",), ("ray::TrainerRank", "ray::TeacherWorker")
"""Titles of the worker processes, by the half of the cores that they get."""


@dataclass(frozen=True)
class Run:
    """One merge."""

    mode: str
    seed: int
    step_s: float
    """Median over the steps after the first two."""
    steps_s: float
    """All steps together."""
    loss: list[float]
    """Mean over the steps of each tenth of the merge."""
    utilisation: dict[str, float]
    oldest: int
    """Age of the oldest token that was trained."""
    drift: float
    """Mean over the steps, nats."""
    headroom: float | None


def opd(*args: object, cwd: Path, halves: tuple[list[int], list[int]] | None = None) -> None:
    """Run a command; with `halves` its workers are kept to their cores."""
    log = cwd / "log.txt"
    with log.open("w") as out:
        process = psutil.Popen(
            [sys.executable, "-m", "cli", *map(str, args)],
            cwd=cwd,
            env=os.environ | {"PYTHONPATH": str(ROOT)},
            stdout=out,
            stderr=subprocess.STDOUT,
        )
    while process.poll() is None:
        if halves:
            for worker in process.children(recursive=True):
                with contextlib.suppress(psutil.NoSuchProcess, ProcessLookupError):
                    keep(worker, halves)
        time.sleep(1)
    if process.returncode:
        last = "\n".join(log.read_text(encoding="utf-8", errors="replace").splitlines()[-LOG_LINES:])
        raise SystemExit(f"opd {args[0]} ended with {process.returncode}:\n{last}")


def keep(worker: psutil.Process, halves: tuple[list[int], list[int]]) -> None:
    """Move every thread of a worker to the cores of its role."""
    title = " ".join(worker.cmdline())
    for titles, cores in zip((ENGINE, OTHERS), halves, strict=True):
        if title.startswith(titles):
            for thread in worker.threads():
                os.sched_setaffinity(thread.id, cores)


def prepare(root: Path, steps: int) -> None:
    """Prompts, a base that knows a little of both tasks, and an expert of each."""
    opd("prompts", "make", "letters", "--output", "prompts", "--domains", ",".join(DOMAINS), cwd=root)
    size = {"hidden_size": 192, "layers": 6, "heads": 6, "intermediate_size": 512, "max_position_embeddings": 128}
    data = {name: f"prompts/{name}/train.jsonl" for name in DOMAINS}
    spec = {
        "output_dir": "models",
        "registry": "registry",
        "base": {"from_scratch": {"tokenizer": "letters", **size}, "data": list(data.values())},
        "train": {"max_steps": steps, "learning_rate": 1.0e-3, "per_device_train_batch_size": 64, "warmup_steps": 10},
        "experts": {name: {"domain": name, "data": file} for name, file in data.items()},
    }
    (root / "spec.yaml").write_text(yaml.safe_dump(spec))
    opd("experts", "train", "spec.yaml", cwd=root)


def merge(root: Path, mode: str, seed: int, args: argparse.Namespace, halves: tuple[list[int], list[int]]) -> Run:
    """One merge, and what its records say."""
    name = f"{mode}-{seed}"
    pipeline = {
        "name": name,
        "seed": seed,
        "student": {"model": "models/base"},
        "registry": "registry",
        "experts": {"use": list(DOMAINS)},
        "domains": {
            d: {"prompts": f"prompts/{d}/train.jsonl", "eval": {"prompts": f"prompts/{d}/eval.jsonl"}} for d in DOMAINS
        },
        "rollout": {"max_new_tokens": 16, "max_model_len": 64},
        "trainer": {"ranks": 1, "steps": args.steps, "samples_per_step": args.samples, "lr": 5.0e-4, "warmup_steps": 5},
        "schedule": {"mode": mode},
        "checkpoint": {"every": 1000},
    }
    (root / f"{name}.yaml").write_text(yaml.safe_dump(pipeline))
    # A role has as many threads as the driver has cores, in `one_step_off` half as many. OMP_THREAD_LIMIT would not do: vLLM's
    # kernels leave out what the threads that are not there should do, and return NaN.
    os.sched_setaffinity(0, halves[0] if mode == "sync" else [*halves[0], *halves[1]])
    opd("merge", f"{name}.yaml", "--run-dir", name, cwd=root, halves=halves)
    records = [json.loads(line) for line in (root / name / "metrics.jsonl").read_text().splitlines()]
    report = json.loads((root / name / "report.json").read_text())
    seconds = [sum(record["phase_s"].values()) for record in records]
    tenth = max(1, len(records) // 10)
    losses = [record["loss"] for record in records]
    return Run(
        mode=mode,
        seed=seed,
        step_s=statistics.median(seconds[2:]),
        steps_s=sum(seconds),
        loss=[statistics.fmean(losses[i : i + tenth]) for i in range(0, len(losses), tenth)],
        utilisation=report["utilisation"],
        oldest=max(int(age) for record in records for age in record["token_ages"]),
        drift=statistics.fmean(record["drift"] for record in records),
        headroom=report["mean_headroom"],
    )


def show(runs: list[Run]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table("schedule", "seed", title="Schedules, each role on its own half of the cores")
    for name in ("step s", "steps s", "rollout", "teachers", "trainer", "oldest", "drift", "last loss", "headroom"):
        table.add_column(name, justify="right")
    for run in runs:
        busy = [f"{100 * run.utilisation[role]:.0f} %" for role in ("rollout", "teachers", "trainer")]
        headroom = "-" if run.headroom is None else f"{run.headroom:.3f}"
        numbers = [str(run.oldest), f"{run.drift:.4f}", f"{run.loss[-1]:.4f}", headroom]
        table.add_row(run.mode, str(run.seed), f"{run.step_s:.2f}", f"{run.steps_s:.0f}", *busy, *numbers)
    Console(width=None if sys.stdout.isatty() else 130).print(table)
    sync, ahead = ([run for run in runs if run.mode == mode] for mode in MODES)
    print(
        "steps of sync over those of one_step_off:",
        *(f"{a.steps_s / b.steps_s:.2f}" for a, b in zip(sync, ahead, strict=True)),
    )
    if len(sync) > 1:
        cost = [apart(a, b) for a, b in zip(sync, ahead, strict=True)]
        noise = [apart(first, second) for first, second, *_ in (sync, ahead)]
        print(
            "losses differ by",
            *(f"{x:.4f}" for x in noise),
            "between two seeds of each schedule, by",
            *(f"{x:.4f}" for x in cost),
            "between the schedules with each seed",
        )


def apart(a: Run, b: Run) -> float:
    """Mean distance of two loss curves over the tenths, nats a token."""
    return statistics.fmean(abs(x - y) for x, y in zip(a.loss, b.loss, strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(
        description="What writing one step ahead gains and costs.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--steps", type=int, default=60, help="of each merge")
    parser.add_argument("--samples", type=int, default=128, help="responses of a step")
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--expert-steps", type=int, default=120)
    parser.add_argument("--json", type=Path, help="write all figures here")
    args = parser.parse_args()
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        raise SystemExit("two cores are needed, one for the engine and one for the others")
    half = len(cores) // 2
    facts = machine(half, *PACKAGES)
    with tempfile.TemporaryDirectory(prefix="opd-schedules-") as scratch:
        prepare(Path(scratch), args.expert_steps)
        halves = cores[:half], cores[half:]
        runs = [merge(Path(scratch), mode, seed, args, halves) for seed in range(args.seeds) for mode in MODES]
    show(runs)
    if args.json:
        args.json.write_text(json.dumps({"machine": facts, "runs": [asdict(run) for run in runs]}, indent=2) + "\n")


if __name__ == "__main__":
    main()
