"""One pipeline in several variants: a merge for each variant and seed, all on the same questions; JSON and a table.

`benchmarks.extrapolate` and `benchmarks.objectives` say which variants. A run directory that is finished is read, one that is not
is resumed, so a comparison that was interrupted goes on with the same command.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import yaml

from benchmarks.machine import machine
from opd.evaluation.scores import DomainScore, Evaluation
from opd.report.intervals import Estimate, difference
from opd.run_dir import EXAMS, RunPaths
from pipelines.catalog import find

ROOT = Path(__file__).resolve().parents[1]
TINY = ("reverse", "double")
"""Domains of `--quick`."""


@dataclass(frozen=True)
class Variant:
    """What differs from the pipeline."""

    name: str
    settings: tuple[str, ...]
    """KEY=VALUE, as `opd merge --set` takes them."""


@dataclass(frozen=True)
class Outcome:
    """One merge."""

    variant: str
    settings: tuple[str, ...]
    seed: int
    accuracy: dict[str, dict[str, float]]
    """before, expert, after -> domain -> share of right answers."""
    mean_headroom: float | None
    above: list[str]
    """Domains in which the merged model is above the expert by more than the 95 % interval of the difference."""
    tokens: int
    wall_s: float


@dataclass(frozen=True)
class Place:
    """Where merges run."""

    cwd: Path
    """Paths in the pipeline are relative to it."""
    pipeline: Path
    runs: Path


def arguments(description: str) -> argparse.ArgumentParser:
    """The options that both comparisons have."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    add = parser.add_argument
    add(
        "--pipeline",
        default="quickstart",
        help="a file or the name of a shipped one, whose prompts and experts are there",
    )
    add("--seeds", nargs="+", type=int, default=[0])
    add(
        "--questions",
        choices=["validation", "exam"],
        default="validation",
        help="validation: a share of the training prompts, so that what is chosen by them meets the exam unseen",
    )
    add("--holdout", type=float, default=0.1, help="that share")
    add("--set", nargs="*", default=[], metavar="KEY=VALUE", help="keys that all variants have")
    add("--folder", type=Path, default=Path("runs/variants"), help="run directories and logs")
    add("--json", type=Path, help="write all figures here, after every merge")
    add("--quick", action="store_true", help="tiny models and merges of two steps: does everything run?")
    return parser


def compare(args: argparse.Namespace, variants: Sequence[Variant], title: str) -> None:
    """Merge every variant with every seed, show the table, and write the JSON."""
    facts = machine(os.cpu_count() or 1, "torch", "transformers", "deepspeed", "ray")
    outcomes: list[Outcome] = []
    with _place(args) as place:
        for seed in args.seeds:
            for variant in variants:
                outcomes.append(_merge(place, variant, seed, args.set))
                print(
                    f"{variant.name}, seed {seed}: mean headroom {_shown(outcomes[-1].mean_headroom)}", file=sys.stderr
                )
                if args.json:
                    data = {
                        "machine": facts,
                        "pipeline": args.pipeline,
                        "questions": args.questions,
                        "merges": [asdict(one) for one in outcomes],
                    }
                    args.json.write_text(json.dumps(data, indent=2) + "\n")
    _show(outcomes, f"{title}, on {args.questions} questions")


@contextmanager
def _place(args: argparse.Namespace) -> Iterator[Place]:
    """A folder with the pipeline that all variants share."""
    if args.quick:
        with tempfile.TemporaryDirectory(prefix="opd-variants-") as scratch:
            folder = Path(scratch)
            yield _written(folder, folder / "runs", _tiny(folder), args)
    else:
        data = yaml.safe_load(find(args.pipeline).read_text(encoding="utf-8"))
        yield _written(Path.cwd(), args.folder.absolute(), data, args)


def _written(cwd: Path, runs: Path, data: dict[str, Any], args: argparse.Namespace) -> Place:
    if args.questions == "validation":
        for domain in data["domains"].values():
            verifier = domain.get("eval", {}).get("verifier", "exact_match")
            domain["eval"] = {"holdout": args.holdout, "verifier": verifier}
    runs.mkdir(parents=True, exist_ok=True)
    file = runs / "pipeline.yaml"
    file.write_text(yaml.safe_dump(data, sort_keys=False), encoding="utf-8")
    return Place(cwd, file, runs)


def _tiny(folder: Path) -> dict[str, Any]:
    """A base and two experts of two steps each, and their pipeline."""
    _opd(
        folder / "prompts.log", folder, "prompts", "make", "letters", "--output", "prompts", "--domains", ",".join(TINY)
    )
    size = {"hidden_size": 64, "layers": 2, "heads": 2, "intermediate_size": 128, "max_position_embeddings": 64}
    data = {name: f"prompts/{name}/train.jsonl" for name in TINY}
    spec = {
        "output_dir": "models",
        "registry": "registry",
        "base": {"from_scratch": {"tokenizer": "letters", **size}, "data": list(data.values())},
        "train": {"max_steps": 2, "learning_rate": 1.0e-3, "per_device_train_batch_size": 8},
        "experts": {name: {"domain": name, "data": file} for name, file in data.items()},
    }
    (folder / "spec.yaml").write_text(yaml.safe_dump(spec))
    _opd(folder / "experts.log", folder, "experts", "train", "spec.yaml")
    domains = {
        name: {"prompts": file, "eval": {"prompts": f"prompts/{name}/eval.jsonl"}} for name, file in data.items()
    }
    return {
        "name": "tiny",
        "student": {"model": "models/base"},
        "registry": "registry",
        "experts": {"use": list(TINY)},
        "domains": domains,
        "rollout": {"max_new_tokens": 8, "max_model_len": 48},
        "trainer": {"ranks": 1, "steps": 2, "samples_per_step": 8},
        "evaluate": {"samples": 8},
    }


def _merge(place: Place, variant: Variant, seed: int, common: Sequence[str]) -> Outcome:
    """Carry out one merge, or the rest of it, and read what it came to."""
    name = f"{variant.name.replace(' ', '-')}-{seed}"
    paths = RunPaths(place.runs / name)
    if not paths.report.exists():
        settings = [word for one in (f"seed={seed}", *common, *variant.settings) for word in ("--set", one)]
        given = (
            ["--resume", str(paths.root)]
            if paths.is_run
            else [str(place.pipeline), "--run-dir", str(paths.root), *settings]
        )
        _opd(place.runs / f"{name}.log", place.cwd, "merge", *given)
    report = json.loads(paths.report.read_text(encoding="utf-8"))
    exams = {exam: Evaluation.load(paths.exam(exam)) for exam in EXAMS}
    after, expert = exams["after"].scores, exams["expert"].scores
    return Outcome(
        variant=variant.name,
        settings=variant.settings,
        seed=seed,
        accuracy={exam: found.accuracy for exam, found in exams.items()},
        mean_headroom=report["mean_headroom"],
        above=[d for d in after if d in expert and difference(_estimate(after[d]), _estimate(expert[d])).low > 0],
        tokens=report["response_tokens"],
        wall_s=report["wall_s"],
    )


def _estimate(score: DomainScore) -> Estimate:
    return Estimate(score.accuracy, score.low, score.high)


def _opd(log: Path, cwd: Path, *command: str) -> None:
    """Run a command of `opd`. Raises: SystemExit with the end of its output if it fails."""
    with log.open("a") as output:
        done = subprocess.run(
            [sys.executable, "-m", "cli", *command],
            cwd=cwd,
            env=os.environ | {"PYTHONPATH": str(ROOT)},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            check=False,
        )
    if done.returncode:
        last = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()[-12:]
        raise SystemExit(f"opd {' '.join(command[:2])} ended with {done.returncode} ({log}):\n" + "\n".join(last))


def _show(outcomes: Sequence[Outcome], title: str) -> None:
    """A row for each variant, accuracies as means over seeds; the student before and the experts above them."""
    from rich.console import Console
    from rich.table import Table

    domains = list(outcomes[0].accuracy["after"])
    table = Table("variant", title=title)
    for name in (*domains, "mean", "headroom", "above expert"):
        table.add_column(name, justify="right")
    for exam, label in (("before", "student before"), ("expert", "experts")):
        table.add_row(label, *_cells([one.accuracy[exam] for one in outcomes], domains), "", "")
    for variant in dict.fromkeys(one.variant for one in outcomes):
        mine = [one for one in outcomes if one.variant == variant]
        known = [one.mean_headroom for one in mine if one.mean_headroom is not None]
        above = f"{fmean(len(one.above) for one in mine):.1f} of {len(domains)}"
        cells = _cells([one.accuracy["after"] for one in mine], domains)
        table.add_row(variant, *cells, _shown(fmean(known) if known else None), above)
    Console(width=None if sys.stdout.isatty() else 60 + 10 * len(domains)).print(table)


def _cells(accuracies: Sequence[dict[str, float]], domains: Sequence[str]) -> list[str]:
    means = [fmean(one[domain] for one in accuracies) for domain in domains]
    return [_shown(value) for value in (*means, fmean(means))]


def _shown(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"
