"""One pipeline in several variants: a merge for each variant and seed, all on the same questions; JSON and a table.

`benchmarks.extrapolate`, `benchmarks.objectives` and `benchmarks.rewards` say which variants. A run directory that is finished is read, one that is not
is resumed, so a comparison that was interrupted goes on with the same command.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import yaml

from benchmarks.asked import claim
from benchmarks.machine import machine
from opd.records.scores import DomainScore, Evaluation
from opd.report.intervals import subtract_estimates
from opd.report.summary import make_estimate
from opd.run.paths import MERGE_EVALUATIONS, RunPaths
from opd.text import format_or_dash
from pipelines.baselines.comparison import mean_headroom
from pipelines.catalog import find_pipeline
from pipelines.merging.results import read_progress

ROOT = Path(__file__).resolve().parents[1]
TINY = ("reverse", "double")
"""Domains of `--quick`."""


@dataclass(frozen=True)
class Variant:
    """Settings that differ from the pipeline's."""

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
    intervals: dict[str, dict[str, tuple[float, float]]]
    """The same keys -> ends of its 95 % interval."""
    mean_headroom: float | None
    above: list[str]
    """Domains in which the merged model is above the expert by more than the 95 % interval of the difference."""
    tokens: int
    """Response tokens that were trained on."""
    wall_s: float


@dataclass(frozen=True)
class Place:
    """Place where merges run."""

    cwd: Path
    """Paths in the pipeline are relative to it."""
    pipeline: Path
    runs: Path

    def run(self, variant: str, seed: int) -> RunPaths:
        """The run directory of a variant."""
        return RunPaths(self.runs / f"{variant.replace(' ', '-')}-{seed}")


def arguments(description: str) -> argparse.ArgumentParser:
    """The options that all comparisons have."""
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
    with place(args, make_tiny) as where:
        for seed in args.seeds:
            for variant in variants:
                outcomes.append(merge(where, variant, seed, args.set))
                tell(outcomes[-1])
                if args.json:
                    data = {
                        "machine": facts,
                        "pipeline": args.pipeline,
                        "questions": args.questions,
                        "merges": [asdict(one) for one in outcomes],
                    }
                    args.json.write_text(json.dumps(data, indent=2) + "\n")
    _show(outcomes, f"{title}, on {args.questions} questions")


def tell(outcome: Outcome) -> None:
    """One line about it."""
    headroom = format_or_dash(outcome.mean_headroom, ".3f")
    print(f"{outcome.variant}, seed {outcome.seed}: mean headroom {headroom}", file=sys.stderr, flush=True)


@contextmanager
def open_world(folder: Path | None, make_world: Callable[[Path], Path]) -> Iterator[Place]:
    """A folder of models and runs; `make_world` writes both into it and returns the pipeline. None: a folder that is deleted at the end."""
    with tempfile.TemporaryDirectory(prefix="opd-world-") as scratch:
        cwd = Path(scratch) if folder is None else folder.absolute()
        (cwd / "runs").mkdir(parents=True, exist_ok=True)
        yield Place(cwd, make_world(cwd), cwd / "runs")


@contextmanager
def place(args: argparse.Namespace, tiny: Callable[[Path], dict[str, Any]]) -> Iterator[Place]:
    """A folder with the pipeline that all variants share; `tiny` makes that of `--quick` and what it names."""
    if args.quick:
        with tempfile.TemporaryDirectory(prefix="opd-variants-") as scratch:
            cwd = Path(scratch)
            runs, data = cwd / "runs", tiny(cwd)
            yield Place(cwd, written(data, runs / "pipeline.yaml", args), runs)
    else:
        runs, data = args.folder.absolute(), yaml.safe_load(find_pipeline(args.pipeline).read_text(encoding="utf-8"))
        yield Place(Path.cwd(), written(data, runs / "pipeline.yaml", args), runs)


def written(data: dict[str, Any], file: Path, args: argparse.Namespace) -> Path:
    """Write a pipeline with the questions that are asked for."""
    if args.questions == "validation":
        for domain in data["domains"].values():
            verifier = domain.get("eval", {}).get("verifier", "exact_match")
            domain["eval"] = {"holdout": args.holdout, "verifier": verifier}
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(yaml.safe_dump(data, sort_keys=False), encoding="utf-8")
    return file


def make_tiny(folder: Path) -> dict[str, Any]:
    """A base and two experts of two steps each, and their pipeline."""
    opd(
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
    opd(folder / "experts.log", folder, "experts", "train", "spec.yaml")
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


def merge(where: Place, variant: Variant, seed: int, common: Sequence[str]) -> Outcome:
    """Carry out one merge, or the rest of it, and read what it came to."""
    paths = where.run(variant.name, seed)
    carry_out(where, paths, [str(where.pipeline), *given(seed, common, variant.settings)])
    return outcome(paths, variant, seed)


def given(seed: int, *settings: Sequence[str]) -> list[str]:
    """Options of `opd merge`."""
    return [word for one in (f"seed={seed}", *(key for some in settings for key in some)) for word in ("--set", one)]


def carry_out(where: Place, paths: RunPaths, begin: Sequence[str]) -> None:
    """Take a merge to its end; one that is not there yet begins with these words of `opd merge`.

    Raises: SystemExit if one that is there was begun with others, or with another pipeline.
    """
    claim(paths.root, {"opd merge": begin, "pipeline": where.pipeline.read_text(encoding="utf-8")})
    if paths.report.exists():
        return
    words = ["--resume", str(paths.root)] if paths.is_run else [*begin, "--run-dir", str(paths.root)]
    opd(where.runs / f"{paths.root.name}.log", where.cwd, "merge", *words)


def outcome(paths: RunPaths, variant: Variant, seed: int) -> Outcome:
    """Return the outcome of a finished merge."""
    exams = {exam: Evaluation.load(paths.evaluation_file(exam)).scores for exam in MERGE_EVALUATIONS}
    wall_s = json.loads(paths.report.read_text(encoding="utf-8"))["wall_s"]
    return measured(variant, seed, exams, read_progress(paths.metrics)[1], wall_s)


def measured(
    variant: Variant, seed: int, exams: Mapping[str, Mapping[str, DomainScore]], tokens: int, wall_s: float
) -> Outcome:
    """The outcome with these exams: before, expert, after -> domain -> score."""
    accuracy = {exam: {domain: score.accuracy for domain, score in found.items()} for exam, found in exams.items()}
    after, expert = exams["after"], exams["expert"]
    return Outcome(
        variant=variant.name,
        settings=variant.settings,
        seed=seed,
        accuracy=accuracy,
        intervals={exam: {d: (score.low, score.high) for d, score in found.items()} for exam, found in exams.items()},
        mean_headroom=mean_headroom(exams["before"], accuracy["after"], exams["expert"]),
        above=[
            d
            for d in after
            if d in expert and subtract_estimates(make_estimate(after[d]), make_estimate(expert[d])).low > 0
        ],
        tokens=tokens,
        wall_s=wall_s,
    )


def opd(log: Path, cwd: Path, *command: str) -> None:
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
        table.add_row(variant, *cells, format_or_dash(fmean(known) if known else None, ".3f"), above)
    Console(width=None if sys.stdout.isatty() else 60 + 10 * len(domains)).print(table)


def _cells(accuracies: Sequence[dict[str, float]], domains: Sequence[str]) -> list[str]:
    means = [fmean(one[domain] for one in accuracies) for domain in domains]
    return [format_or_dash(value, ".3f") for value in (*means, fmean(means))]
