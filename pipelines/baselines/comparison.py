"""`opd compare`: a merge and every baseline, over several seeds, as one table and one picture.

    ROOT/seed-N/            a run directory of `opd merge`, with its `baselines/`
    ROOT/comparison.json    all numbers    ROOT/comparison.md    the table    ROOT/comparison.svg    accuracy by token share

Results that exist are not computed again: after an interruption the same command goes on.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from math import sqrt
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from opd.config import PipelineConfig, load_run_pipeline
from opd.errors import RunDirError
from opd.evaluation.baselines import BaselineResult
from opd.files import atomic_file, atomic_write_text
from opd.records.scores import Evaluation
from opd.records.sums import mean_or_none
from opd.report import clear_domains, markdown_table, recovered_share
from opd.run.paths import MERGE_EVALUATIONS, ComparisonPaths, RunPaths
from opd.settings.yaml_files import validate_section
from opd.text import format_or_dash
from pipelines.baselines.jobs import METHODS, TRAINED_METHODS, plan_jobs, refuse_rounds
from pipelines.baselines.run import check_methods, compute_results
from pipelines.baselines.significance import Difference, Scores, compare_methods, t_quantile
from pipelines.baselines.weights import WEIGHT_METHODS
from pipelines.inputs.read import Inputs, read_inputs, refuse_without_experts
from pipelines.inputs.template_date import as_recorded, with_template_date
from pipelines.merging import run as merging
from pipelines.merging.changes import TEMPLATE_DATE, other_rules, refused_keys
from pipelines.merging.manifest import read_manifest, resolve_pipeline
from pipelines.merging.results import read_progress

FORMAT = 1
WHOLE_SECTIONS = ("seed", "trainer", "rollout", "objective", "teachers", "evaluate")
"""Keys of a pipeline in which all seeds of a comparison are alike, also where a resume might change something."""
NOT_OF_A_MERGE = ("name", "logging")
"""Keys that no number depends on."""
COLUMNS = ("method", "share", "response tokens", "mean accuracy", "headroom", "against opd")


@dataclass(frozen=True, slots=True, kw_only=True)
class SeedMean:
    """A mean over seeds with its 95 % interval."""

    mean: float
    low: float
    high: float
    by_seed: tuple[float, ...]

    @classmethod
    def from_values(cls, values: Sequence[float]) -> SeedMean:
        """Make the mean with Student's t interval; for one value the interval is the value itself."""
        mean = fmean(values)
        half = t_quantile(len(values) - 1) * stdev(values) / sqrt(len(values)) if len(values) > 1 else 0.0
        return cls(mean=mean, low=mean - half, high=mean + half, by_seed=tuple(values))

    def __format__(self, form: str) -> str:
        form = form or ".3f"
        interval = f" ± {format(self.high - self.mean, form)}" if len(self.by_seed) > 1 else ""
        return format(self.mean, form) + interval

    def __str__(self) -> str:
        return format(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparisonRow:
    """One method at one share."""

    method: str
    label: str
    share: float | None
    """None for merges of weights."""
    tokens: float | None
    """Response tokens trained on, mean over seeds."""
    accuracy: SeedMean
    """Mean over domains."""
    headroom: SeedMean | None
    """Mean over the domains where the expert is better than the student beyond chance; None if there is none."""
    difference: Difference | None = None
    """From the accuracy of on-policy distillation at the same share of the training; merges of weights are compared with the
    whole training. None if distillation ran with one seed only."""
    verdict: str = ""
    """`tie`, `better` or `worse`, as the interval of the difference says; empty without one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _SeedResults:
    """The numbers of one seed's run directory."""

    before: Evaluation
    expert: Evaluation
    merge: dict[str, Any]
    """Steps, response tokens and weights of this seed's merge, with which its baselines are compared."""
    results: list[BaselineResult]


Group = list[tuple[_SeedResults, BaselineResult]]
"""A method at one share: its result of each seed."""


def run_comparison(
    config: PipelineConfig,
    root: Path,
    seeds: Sequence[int],
    methods: Sequence[str],
    shares: Sequence[float],
    tell: Callable[[str], None],
) -> list[ComparisonRow]:
    """Compute what is missing, write the three files, return the table.

    Raises: OpdError before any compute, RunError during it; Interrupted after Ctrl-C in a merge.
    """
    refuse_rounds(config)
    refuse_without_experts(config, "`opd compare`")
    paths = ComparisonPaths(root)
    config = _as_begun(config, paths)
    inputs = read_inputs(config)
    check_methods(config, inputs, methods)  # before hours of the first merge
    config = with_template_date(config, config.student.template_date or inputs.template_date)
    merges = [(config.model_copy(update={"seed": seed}), paths.seed_dir(seed)) for seed in seeds]
    for seeded, run_paths in merges:
        _refuse_another_merge(seeded, inputs, run_paths)
    _tell_of_older_seeds(merges, tell)
    # Merges of weights that do not depend on the seed are made once.
    seeded_methods = [m for m in methods if m not in WEIGHT_METHODS or WEIGHT_METHODS[m].random]
    by_seed = [_compute_seed(*run, methods if run is merges[0] else seeded_methods, shares, tell) for run in merges]
    rows = comparison_rows(by_seed)
    student = SeedMean.from_values([fmean(run.before.accuracy.values()) for run in by_seed])
    expert = SeedMean.from_values([fmean(run.expert.accuracy.values()) for run in by_seed])
    data = {
        "format": FORMAT,
        "name": config.name,
        "seeds": list(seeds),
        "before": asdict(student),
        "expert": asdict(expert),
        "merges": [run.merge for run in by_seed],
        "rows": [asdict(row) for row in rows],
    }
    atomic_write_text(paths.numbers, json.dumps(data, indent=1))
    atomic_write_text(paths.table, comparison_markdown(student, expert, rows))
    draw_comparison(rows, paths.picture)
    return rows


def _as_begun(config: PipelineConfig, paths: ComparisonPaths) -> PipelineConfig:
    """Return the pipeline with the settings of prompts (template date, special tokens, columns) of the first seed that exists,
    so that all seeds of a comparison have the same tokens."""
    seed_configs = (load_run_pipeline(run.pipeline) for run in paths.seed_dirs() if run.pipeline.exists())
    first_config = next(seed_configs, config)
    return with_template_date(as_recorded(config, first_config), first_config.student.template_date)


def _compute_seed(
    config: PipelineConfig,
    paths: RunPaths,
    methods: Sequence[str],
    shares: Sequence[float],
    tell: Callable[[str], None],
) -> _SeedResults:
    name = paths.root.name
    if not paths.report.exists():
        tell(f"{name}: the merge")
        merging.start_or_resume(config, paths.root)
    jobs = [
        job
        for method in methods
        for job in plan_jobs(config, paths.root, [method], shares if method in TRAINED_METHODS else None, None)
    ]
    results = compute_results(jobs, lambda line: tell(f"{name}: {line}"))
    before, expert, after = (Evaluation.load(paths.evaluation_file(name)) for name in MERGE_EVALUATIONS)
    steps, tokens = read_progress(paths.metrics)
    merge = {"seed": config.seed, "steps": steps, "tokens": tokens, "weights": next(iter(after.weights.values()), "")}
    return _SeedResults(before=before, expert=expert, merge=merge, results=results)


def _refuse_another_merge(config: PipelineConfig, inputs: Inputs, paths: RunPaths) -> None:
    """Refuse to put results of two pipelines into one table. A resume checks whether files have changed."""
    if not paths.root.exists():
        return
    stored = load_run_pipeline(paths.pipeline)
    # With absolute paths, as a run has them.
    current = validate_section(PipelineConfig, resolve_pipeline(config, inputs), paths.pipeline)
    changed = [name for name in WHOLE_SECTIONS if getattr(stored, name) != getattr(current, name)]
    decisive = refused_keys(stored.model_dump(mode="json"), current.model_dump(mode="json"))
    changed += [key.partition(".")[0] for key in decisive if key != TEMPLATE_DATE]  # a run of an older release has none
    other_keys = [name for name in dict.fromkeys(changed) if name not in NOT_OF_A_MERGE]
    if other_keys:
        raise RunDirError.at(
            paths.root,
            found=f"a merge with other settings: {', '.join(other_keys)}",
            wanted="the merge of this pipeline, begun earlier",
            fix="give another --run-dir, or remove this directory",
        )


def _tell_of_older_seeds(merges: Sequence[tuple[PipelineConfig, RunPaths]], tell: Callable[[str], None]) -> None:
    """Say which seeds are finished merges of an older release, if others are not: they differ by more than chance."""
    rules_by_seed = {
        paths.root.name: other_rules(read_manifest(paths), config)
        for config, paths in merges
        if paths.manifest.exists() and paths.report.exists()
    }
    older = [name for name, rules in rules_by_seed.items() if rules]
    if older and len(older) < len(merges):
        tell(
            f"warning: {', '.join(older)}: merged by a release that decided otherwise {'; '.join(rules_by_seed[older[0]])}: the seeds differ by "
            "more than chance; another --run-dir takes them all anew"
        )


def comparison_rows(seeds: Sequence[_SeedResults]) -> list[ComparisonRow]:
    """Return a row for each method and share, methods in their order, larger shares first."""
    groups: dict[tuple[str, float | None], Group] = {}
    for seed in seeds:
        for result in seed.results:
            groups.setdefault((result.method, result.token_share), []).append((seed, result))
    order = sorted(groups, key=lambda key: (METHODS[::-1].index(key[0]), -(key[1] or 0)))
    return [
        _compare_with_opd(
            _summarise_group(groups[key]), groups[key], groups.get(("opd", 1.0 if key[1] is None else key[1]))
        )
        for key in order
    ]


def _summarise_group(group: Group) -> ComparisonRow:
    results = [result for _, result in group]
    gains = [
        mean_headroom(seed.before.scores, {d: s.accuracy for d, s in result.scores.items()}, seed.expert.scores)
        for seed, result in group
    ]
    return ComparisonRow(
        method=results[0].method,
        label=" / ".join(dict.fromkeys(result.label for result in results)),
        share=results[0].token_share,
        tokens=mean_or_none(result.tokens for result in results),
        accuracy=SeedMean.from_values([result.accuracy for result in results]),
        headroom=SeedMean.from_values([gain for gain in gains if gain is not None]) if None not in gains else None,
    )


def mean_headroom(before: Scores, after: Mapping[str, float], expert: Scores) -> float | None:
    """Return the mean headroom over the domains of `after` where the expert is better than the student beyond chance; None if
    there is none."""
    clear = clear_domains(before, expert)
    shares = [recovered_share(before[d].accuracy, after[d], expert[d].accuracy) for d in after if d in clear]
    return mean_or_none(shares)


def _compare_with_opd(row: ComparisonRow, group: Group, opd: Group | None) -> ComparisonRow:
    if opd is None or row.method == "opd" or len(opd) == 1:
        return row  # with one seed the share of chance is unknown
    difference = compare_methods(*([result.scores for _, result in side] for side in (group, opd)))
    return replace(row, difference=difference, verdict=difference.verdict)


def row_cells(row: ComparisonRow) -> tuple[str, ...]:
    """Return the cells of a row, in the order of `COLUMNS`."""
    return (
        row.label,
        format_or_dash(row.share, "g"),
        format_or_dash(row.tokens, ",.0f"),
        str(row.accuracy),
        "-" if row.headroom is None else str(row.headroom),
        f"{row.verdict} ({row.difference})" if row.difference else "-",
    )


def comparison_markdown(student: SeedMean, expert: SeedMean, rows: Sequence[ComparisonRow]) -> str:
    """Return the table, with the student before the merge and the experts above it."""
    note = f"Mean accuracy of the student before: {student.mean:.3f}; of the experts: {expert.mean:.3f}."
    return markdown_table(COLUMNS, [row_cells(row) for row in rows]) + f"\n\n{note}\n"


def draw_comparison(rows: Sequence[ComparisonRow], path: Path) -> None:
    """Draw accuracy by share of the training; methods without training are level lines."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4.5))
    for index, row in enumerate(row for row in rows if row.share is None):
        axes.axhline(row.accuracy.mean, linestyle=":", linewidth=1, color="#888888")
        # Labels stand side by side, because some levels are nearly equal.
        label_position = (0.01 + 0.14 * index, row.accuracy.mean)
        axes.annotate(row.label, label_position, xycoords=("axes fraction", "data"), fontsize=7, va="bottom")
    for method in dict.fromkeys(row.method for row in rows if row.share is not None):
        points = [(row.share, row.accuracy) for row in rows if row.method == method and row.share is not None]
        means = [accuracy.mean for _, accuracy in points]
        errors = [[a.mean - a.low for _, a in points], [a.high - a.mean for _, a in points]]
        label = TRAINED_METHODS[method]
        axes.errorbar([share for share, _ in points], means, yerr=errors, marker="o", capsize=3, label=label)
    axes.set(xlabel="share of the merge's response tokens", ylabel="mean accuracy over domains", xscale="log")
    shares = sorted({row.share for row in rows if row.share is not None})
    axes.set_xticks(shares, [f"{share:g}" for share in shares], minor=False)
    axes.minorticks_off()
    axes.grid(True, alpha=0.3)
    if shares:  # levels have their names beside them
        axes.legend(loc="lower right")
    figure.tight_layout()
    with atomic_file(path) as file:
        figure.savefig(file, format="svg")
    plt.close(figure)
