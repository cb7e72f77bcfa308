"""Read a run directory for its report, whether the merge is finished or not. `pipeline.yaml` or `report.json` has to exist."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import yaml
from pydantic import BaseModel, ValidationError

from opd.errors import RunDirError
from opd.evaluation.baselines import BaselineResult
from opd.monitors.alarms import Alarms
from opd.records.scores import FORMAT, Evaluation, combine_evaluations
from opd.records.step import StepRecord
from opd.run.metrics import MetricsFile
from opd.run.paths import RunPaths
from opd.settings.yaml_files import parse_yaml
from opd.traces.record import StepTraces, read_traces

T = TypeVar("T")


class ManifestExpert(BaseModel):
    """Facts about an expert that the report reads in manifest.json."""

    domains: list[str]
    weights: dict[str, str]
    config: dict[str, str] = {}
    adapter: dict[str, str] = {}


class ModelFacts(BaseModel):
    """Facts of a model in manifest.json."""

    parameters: int = 0


class ManifestModels(BaseModel):
    """Facts of all models, by name."""

    student: ModelFacts = ModelFacts()
    experts: dict[str, ModelFacts] = {}


class DomainFigures(BaseModel):
    """Figures of a domain that the report reads in report.json."""

    before: float | None = None
    after: float | None = None
    expert: float | None = None
    headroom: float | None = None


class StoredReport(BaseModel):
    """Part of report.json that is read, to check its types. The file has more."""

    name: str
    steps: int
    domains: dict[str, DomainFigures]
    wall_s: float
    phase_s: dict[str, float]
    response_tokens: float
    response_tokens_per_s: float
    versions: dict[str, str]


class ManifestShape(BaseModel):
    """Part of manifest.json that is read, to check its types. The file has more."""

    student: dict[str, str] = {}
    experts: dict[str, ManifestExpert] = {}
    models: ManifestModels = ManifestModels()
    versions: dict[str, str] = {}
    lineage: list[dict[str, Any]] = []
    command: str | None = None


STORED = ("name", "steps", "domains", "wall_s", "phase_s", "response_tokens", "response_tokens_per_s", "versions")
"""Keys that are taken from a stored report. All but `domains` cannot be computed again; `domains`, which has the accuracies,
is used only if the evaluation files are missing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFiles:
    """The parsed files of a run directory."""

    root: Path
    stored: dict[str, Any] | None
    """Content of report.json; None if the merge has never finished."""
    pipeline_text: str
    pipeline: dict[str, Any]
    """Empty if there is no pipeline.yaml."""
    manifest: dict[str, Any]
    records: list[StepRecord]
    """Content of metrics.jsonl: a record for each step."""
    before: Evaluation | None
    expert: Evaluation | None
    after: Evaluation | None
    """The evaluation at the end; None if the merge is not finished."""
    during: dict[int, Evaluation]
    """Step -> evaluation during the merge, in order."""
    alarms: dict[int, Alarms]
    """Step -> readings of the monitors that acted after it, in order."""
    traces: dict[int, StepTraces]
    """Step -> the episodes that were kept of it, in order."""
    matrix: dict[str, Evaluation]
    """Name of a model -> its evaluation on every domain."""
    baselines: list[BaselineResult]
    """Results of other methods with the same experts and questions, one for each file."""
    rounds: list[RunFiles]
    """The rounds that have begun, if the merge has several. `records`, `during` and the exams then cover all rounds, and
    steps are numbered through from the first round to the last."""
    planned_steps: int | None
    """Steps of the whole merge; None if there is no pipeline."""

    @property
    def without_teachers(self) -> bool:
        """True if the run learns from rewards alone. Then there are no experts to compare it with."""
        return bool(self.pipeline) and self.pipeline.get("experts") == {}

    @property
    def finished(self) -> bool:
        """True if report.json covers all planned steps. It does not while an extended merge takes its new steps."""
        if self.stored is None:
            return False
        step_counts = {self.stored["steps"], *([len(self.records)] if self.records else ())}
        return self.planned_steps is None or step_counts == {self.planned_steps}


def read_run(root: Path) -> RunFiles:
    """Read all files of a run directory. Raises: RunDirError if it is no run directory, or if a file is damaged."""
    paths = RunPaths(root)
    if not paths.pipeline.exists() and not paths.report.exists():
        raise RunDirError.at(
            root,
            found=f"neither {paths.pipeline.name} nor {paths.report.name}",
            wanted="a run directory of `opd merge`",
            fix="check the path; `opd merge PIPELINE` makes one",
        )
    text, pipeline = _read_pipeline(paths.pipeline)
    plan = _steps_of_rounds(paths.rounds)
    rounds = [paths.round_dir(index + 1).root for index in range(len(plan))]
    run = RunFiles(
        root=root,
        stored=_read_stored(paths.report),
        pipeline_text=text,
        pipeline=pipeline,
        manifest=_read_manifest(paths.manifest),
        records=_read_records(paths.metrics),
        before=_read_evaluation(paths.evaluation_file("before")),
        expert=_read_evaluation(paths.evaluation_file("expert")),
        after=_read_evaluation(paths.evaluation_file("after")),
        during={s: _read_file(Evaluation.from_json, path) for s, path in paths.evaluations_by_step().items()},
        alarms={s: _read_file(Alarms.from_json, path) for s, path in paths.alarms_by_step().items()},
        traces={step: read_traces(path) for step, path in paths.traces_by_step().items()},
        matrix=_read_matrix(paths.matrix),
        baselines=[_read_file(BaselineResult.from_json, path) for path in paths.baseline_results()],
        rounds=[read_run(path) for path in rounds if path.exists()],
        planned_steps=sum(plan) if plan else _trainer_steps(pipeline, paths.pipeline),
    )
    return _drop_unrecorded_exams(chain_rounds(run) if run.rounds else run)


def _drop_unrecorded_exams(run: RunFiles) -> RunFiles:
    """Drop exams of steps without a record. An exam is written before its step's record, and a kill may come in between.

    If the merge was finished and goes on from its end, the exam of that end becomes one during the merge. If it goes on
    from an earlier step, that exam is dropped.
    """
    last_step = len(run.records)
    during = {step: evaluation for step, evaluation in run.during.items() if step <= last_step}
    if run.after is None or run.finished:
        return replace(run, during=during)
    step = run.after.step or (run.stored["steps"] if run.stored else last_step)
    during |= {step: run.after} if 0 < step <= last_step else {}
    return replace(run, after=None, during=dict(sorted(during.items())))


def chain_rounds(run: RunFiles) -> RunFiles:
    """Return a merge of several rounds as if it were one merge.

    Steps are numbered through all rounds, and the exam at the end of each round is an evaluation during the merge.
    """
    records: list[StepRecord] = []
    during: dict[int, Evaluation] = {}
    alarms: dict[int, Alarms] = {}
    traces: dict[int, StepTraces] = {}
    for round_files in run.rounds:
        offset = len(records)
        records += [_shift_record(record, offset) for record in round_files.records]
        alarms |= {offset + step: entry for step, entry in round_files.alarms.items()}
        traces |= {offset + step: entry for step, entry in round_files.traces.items()}
        during |= {offset + step: entry for step, entry in round_files.during.items()}
        if round_files.after:
            during[len(records)] = round_files.after
    experts = [round_files.expert for round_files in run.rounds if round_files.expert]
    return replace(
        run,
        records=records,
        during=during,
        alarms=alarms,
        traces=traces,
        before=run.before or run.rounds[0].before,
        expert=run.expert or (combine_evaluations(experts, experts[-1].model) if experts else None),
    )


def _shift_record(record: StepRecord, offset: int) -> StepRecord:
    """Return a record of a round as one of the whole merge, which had taken `offset` steps before the round."""
    alarms = tuple(replace(alarm, since=offset + alarm.since) for alarm in record.alarms)
    return replace(record, step=offset + record.step, alarms=alarms)


def _steps_of_rounds(path: Path) -> list[int]:
    """Return the steps of each round; empty for a merge of one round."""
    data = _load_json(path)
    if data is None:
        return []
    try:
        return [int(entry["config"]["trainer"]["steps"]) for entry in data["rounds"]]
    except (KeyError, TypeError, ValueError) as error:
        raise _make_damaged_error(path, f"{type(error).__name__}: {error}") from None


def _read_pipeline(path: Path) -> tuple[str, dict[str, Any]]:
    if not path.exists():
        return "", {}
    try:
        text = path.read_text(encoding="utf-8")
        pipeline = parse_yaml(text)
    except (ValueError, yaml.YAMLError) as error:
        raise _make_damaged_error(path, str(error)) from None
    if not isinstance(pipeline, dict):
        raise _make_damaged_error(path, "no mapping")
    return text, pipeline


def _trainer_steps(pipeline: Mapping[str, Any], path: Path) -> int | None:
    """Return `trainer.steps`; None if there is no pipeline. Raises: RunDirError if it is no whole number."""
    trainer = pipeline.get("trainer", {})
    steps = trainer.get("steps") if isinstance(trainer, dict) else trainer
    if steps is not None and not isinstance(steps, int):
        raise _make_damaged_error(path, f"trainer.steps: {steps!r:.60}")
    return steps


def _load_json(path: Path) -> Any:
    """Return the parsed file; None if it does not exist. Raises: RunDirError if it is no JSON."""
    if not path.exists():
        return None
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise _make_damaged_error(path, str(error)) from None


def _read_manifest(path: Path) -> dict[str, Any]:
    """Return the manifest; empty if it does not exist. Raises: RunDirError if it is damaged."""
    if not path.exists():
        return {}
    return _check_shape(ManifestShape, _load_json(path), path)


def _check_shape(shape: type[BaseModel], data: Any, path: Path) -> dict[str, Any]:
    """Return the data of a file unchanged, after checking that the parts that the report reads have the types of `shape`.

    Raises: RunDirError.
    """
    try:
        shape.model_validate(data)
    except ValidationError as error:
        detail = error.errors()[0]
        raise _make_damaged_error(
            path, f"{'.'.join(map(str, detail['loc'])) or 'the file'}: {detail['msg'].lower()}"
        ) from None
    mapping: dict[str, Any] = data
    return mapping


def _read_stored(path: Path) -> dict[str, Any] | None:
    if not path.exists():
        return None
    data = _load_json(path)
    missing = [key for key in STORED if key not in data] if isinstance(data, dict) else STORED
    if missing:
        raise _make_damaged_error(path, f"no {', '.join(missing)}")
    return _check_shape(StoredReport, data, path)


def _read_records(path: Path) -> list[StepRecord]:
    try:
        return MetricsFile(path).read()
    except (ValueError, TypeError) as error:
        raise _make_damaged_error(path, str(error)) from None


def _read_evaluation(path: Path) -> Evaluation | None:
    return _read_file(Evaluation.from_json, path) if path.exists() else None


def _read_matrix(path: Path) -> dict[str, Evaluation]:
    data = _load_json(path)
    if data is None:
        return {}
    _check_format(data, path)
    try:
        models = data["models"].items()
    except (KeyError, AttributeError) as error:
        raise _make_damaged_error(path, f"no models: {error}") from None
    if not all(isinstance(model, dict) for _, model in models):
        raise _make_damaged_error(path, "a model that is no mapping")
    return {name: _parse_data(Evaluation.from_json, {"format": FORMAT, **model}, path) for name, model in models}


def _read_file(read: Callable[[Any], T], path: Path) -> T:
    return _parse_data(read, _load_json(path), path)


def _parse_data(read: Callable[[Any], T], data: Any, path: Path) -> T:
    """Convert a file's data with `read`. Raises: RunDirError if the data has another form."""
    _check_format(data, path)
    try:
        return read(data)
    except (KeyError, TypeError, AttributeError) as error:
        raise _make_damaged_error(path, f"{type(error).__name__}: {error}") from None


def _check_format(data: Any, path: Path) -> None:
    version = data.get("format") if isinstance(data, Mapping) else None
    if version != FORMAT:
        raise _make_damaged_error(path, f"format {version!r:.60}")


def _make_damaged_error(path: Path, problem: str) -> RunDirError:
    return RunDirError.at(
        path,
        found=problem,
        wanted="the file as this version of opd wrote it",
        fix="move it away: the report then leaves out what it held",
    )
