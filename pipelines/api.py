"""Merges from Python: the functions that `opd` offers to a program or a notebook.

    import opd
    result = opd.merge("quickstart", on_step=lambda record: print(record.step, record.loss))
    print(result.after, result.model)

No signal handler is set and nothing is printed unless the caller asks for it. Errors are those of `opd.errors`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from experts.registry import ExpertManifest, Registry, default_root
from opd import config as pipeline_files
from opd.config import PipelineConfig
from opd.live.displays import RunStart, open_display
from opd.live.interfaces import Display
from opd.records.step import StepRecord
from opd.report import read_run
from opd.run.paths import RunPaths
from opd.settings.yaml_files import apply_overrides, validate_section
from opd.text import Tell
from pipelines.catalog import find_pipeline
from pipelines.evaluation.models import evaluate_models
from pipelines.interrupts import Interrupts, interrupts
from pipelines.merging import rounds
from pipelines.merging.callbacks import MergeCallbacks
from pipelines.plan.plan import MergePlan, make_plan
from pipelines.plan.spec import DEFAULT, load_spec

if TYPE_CHECKING:
    from pipelines.check.measure import CheckReport

Pipeline = PipelineConfig | Path | str | Mapping[str, Any]
"""A pipeline as an object, a file, the name of a shipped one, or its keys as plain data."""
OnStep = Callable[[StepRecord], None]


@dataclass(frozen=True, slots=True)
class MergeResult:
    """The result of a merge that has ended."""

    run_dir: Path
    report: Mapping[str, Any]
    """The contents of report.json; docs/report.md lists the keys."""

    @property
    def model(self) -> Path:
        """Hugging Face directory of the merged model."""
        return RunPaths(self.run_dir).model

    @property
    def records(self) -> list[StepRecord]:
        """The record of every step."""
        return read_run(self.run_dir).records

    @property
    def before(self) -> dict[str, float]:
        """Accuracy of the student before the merge, by domain."""
        return self._exam_accuracy("before")

    @property
    def expert(self) -> dict[str, float]:
        """Accuracy of each domain's expert."""
        return self._exam_accuracy("expert")

    @property
    def after(self) -> dict[str, float]:
        """Accuracy of the merged model, by domain."""
        return self._exam_accuracy("after")

    @property
    def mean_headroom(self) -> float | None:
        """Share of the way from student to expert, as a mean over domains; None if no expert is better than the student."""
        headroom: float | None = self.report["mean_headroom"]
        return headroom

    def _exam_accuracy(self, exam: str) -> dict[str, float]:
        return {domain: values[exam] for domain, values in self.report["domains"].items()}


def load_pipeline(pipeline: Pipeline, overrides: Sequence[str] = ()) -> PipelineConfig:
    """Load a pipeline with every default filled in; `overrides` are KEY=VALUE. Raises: ConfigError."""
    if isinstance(pipeline, PipelineConfig | Mapping):
        data = pipeline.model_dump(mode="json") if isinstance(pipeline, PipelineConfig) else pipeline
        return validate_section(PipelineConfig, apply_overrides(dict(data), list(overrides)), "pipeline")
    return pipeline_files.load_pipeline(find_pipeline(str(pipeline)), list(overrides))


def merge(
    pipeline: Pipeline,
    *,
    run_dir: Path | str | None = None,
    on_step: OnStep | None = None,
    tell: Tell | None = None,
    progress: bool = False,
    handle_signals: bool = False,
) -> MergeResult:
    """Merge a pipeline's experts into its student. Blocks until the report is there.

    `run_dir` must not exist; default: `runs/NAME`. `on_step` gets each step's record once it is stored, `tell` each
    sentence that the command line would print; `progress` shows its screen instead. With `handle_signals` Ctrl-C finishes the
    step and leaves a checkpoint; without, it ends the merge at once. `resume` goes on in both cases.
    Raises: OpdError before any compute, RunError if the run cannot go on.
    """
    config = load_pipeline(pipeline)
    root = Path(run_dir) if run_dir is not None else Path("runs") / config.name
    work = rounds.begin_rounds(config, root, tell or _say_nothing)
    return MergeResult(root, work.carry_out(_make_callbacks(on_step, tell, progress, handle_signals)))


def resume(
    run_dir: Path | str,
    *,
    overrides: Sequence[str] = (),
    on_step: OnStep | None = None,
    tell: Tell | None = None,
    progress: bool = False,
    handle_signals: bool = False,
) -> MergeResult:
    """Go on with an interrupted merge from its last checkpoint. Takes and raises what `merge` does; `overrides` are
    KEY=VALUE of the keys that a resume may change."""
    root = Path(run_dir)
    work = rounds.reopen_rounds(root, None, list(overrides), "latest", tell or _say_nothing)
    return MergeResult(root, work.carry_out(_make_callbacks(on_step, tell, progress, handle_signals)))


def evaluate(
    models: Sequence[Path | str], pipeline: Pipeline, *, domains: Sequence[str] | None = None, tell: Tell | None = None
) -> dict[str, dict[str, float]]:
    """Accuracy by model and domain on the pipeline's held-out prompts; models are Hugging Face or adapter directories.

    Raises: OpdError before any compute, RunError if a worker fails.
    """
    config = load_pipeline(pipeline)
    evaluations = evaluate_models(config, [Path(model) for model in models], domains, tell or _say_nothing)
    return {name: evaluation.accuracy for name, evaluation in evaluations.items()}


def check(pipeline: Pipeline, *, samples: int = 32, tell: Tell | None = None) -> CheckReport:
    """Measure whether a merge is worth starting, as `opd check` does, on `samples` held-out prompts per domain.

    Raises: OpdError before any compute, RunError if a worker fails.
    """
    from pipelines.check.measure import check_pipeline
    from pipelines.inputs.early_checks import refuse_at_once

    config = load_pipeline(pipeline)
    refuse_at_once(config)
    return check_pipeline(config, samples, tell or _say_nothing)


def plan(pipeline: Pipeline, *, cluster: str = DEFAULT) -> MergePlan:
    """Return what a merge needs on a cluster, a spec's file or the name of a shipped one, and how long it takes. Raises: OpdError."""
    return make_plan(load_pipeline(pipeline), load_spec(cluster))


def register_expert(
    name: str,
    model: Path | str,
    domain: str,
    *,
    prompts: Path | str | None = None,
    base: Path | str | None = None,
    registry: Path | str | None = None,
) -> ExpertManifest:
    """Check an expert's files and write its manifest, as `opd experts add` does. Raises: OpdError."""
    store = Registry(Path(registry) if registry is not None else default_root())
    return store.add(name, Path(model), domain, _as_path(prompts), _as_path(base))


def _as_path(path: Path | str | None) -> Path | None:
    return None if path is None else Path(path)


def _say_nothing(line: str) -> None: ...


class _CallbackDisplay(Display):
    """A display that hands sentences on and leaves the steps to the callback."""

    def __init__(self, tell: Tell) -> None:
        self._tell = tell

    def say(self, line: str) -> None:
        self._tell(line)


class _Callback:
    """A sink that calls the user's function."""

    def __init__(self, on_step: OnStep) -> None:
        self.step = on_step


def _make_callbacks(on_step: OnStep | None, tell: Tell | None, progress: bool, handle_signals: bool) -> MergeCallbacks:
    @contextmanager
    def open_callback_display(beginning: RunStart) -> Iterator[Display]:
        yield _CallbackDisplay(tell or _say_nothing)

    @contextmanager
    def ignore_signals() -> Iterator[Interrupts]:
        yield Interrupts()

    return MergeCallbacks(
        display=open_display if progress else open_callback_display,
        signals=interrupts if handle_signals else ignore_signals,
        sinks=(_Callback(on_step),) if on_step else (),
    )
