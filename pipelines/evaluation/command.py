"""Carry out `opd evaluate`: find the pipeline and the models, evaluate, and give the results as data and tables."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from opd.config import PipelineConfig, load_pipeline, load_run_pipeline
from opd.config.domains import DomainEvalConfig
from opd.config.evaluate import LMEvalConfig
from opd.errors import ConfigError, RunError
from opd.evaluation import harness
from opd.evaluation.evaluator import MERGED
from opd.evaluation.harness import TaskScores
from opd.files import atomic_write_text
from opd.records.scores import FORMAT, Evaluation
from opd.run.paths import RunPaths
from opd.settings.suggestions import did_you_mean
from opd.settings.yaml_files import apply_overrides
from opd.text import Tell
from pipelines.catalog import find_pipeline
from pipelines.evaluation.lm_eval import lm_eval_models
from pipelines.evaluation.matrix import Matrix, evaluate_matrix
from pipelines.evaluation.models import evaluate_models, with_all_domains
from pipelines.evaluation.tables import length_rows, matrix_rows, score_columns, score_rows, side_by_side_rows
from pipelines.merging.changes import refused_keys

Table = tuple[str, tuple[str, ...], list[tuple[str, ...]]]
"""Title, headings, rows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluateOptions:
    """The options of one call of `opd evaluate`: `models`, or a `matrix`."""

    models: Sequence[Path] = ()
    """Models, or run directories with one."""
    matrix: str | None = None
    """A run directory or a pipeline; every model of it takes every exam."""
    pipeline: str | None = None
    """The pipeline with the exams. None: the pipeline of the run that the first model comes from."""
    domains: Sequence[str] | None = None
    """Domains to evaluate. None: all that have an exam, or those that `prompts` names."""
    prompts: Sequence[str] = ()
    """Files of questions in place of the pipeline's: DOMAIN=FILE, or FILE where there is one domain."""
    tasks: Sequence[str] = ()
    """Public tasks beside those of the pipeline."""
    overrides: list[str] | None = None
    side_by_side: bool = False
    """One table with a column for each model."""


@dataclass(frozen=True, slots=True)
class EvaluateOutput:
    """The result of one call of `opd evaluate`."""

    data: dict[str, Any]
    """The result as data, for `--json` and `--output`."""
    tables: list[Table]
    failure: RunError | None = None
    """Reason why the public tasks are missing, where the exams were taken: they are not lost with them."""


def run_evaluation(options: EvaluateOptions, tell: Tell) -> EvaluateOutput:
    """Evaluate models or a matrix. Raises: OpdError before any compute, RunError during it."""
    return (
        _evaluate_models(options, tell) if options.matrix is None else _evaluate_matrix(options, options.matrix, tell)
    )


def _evaluate_models(options: EvaluateOptions, tell: Tell) -> EvaluateOutput:
    """Evaluate models on a pipeline's exams and public tasks, and on the tasks of the options; without a pipeline on these alone."""
    dirs = [RunPaths(path).model if RunPaths(path).is_run else path for path in options.models]
    file, load = (
        (find_pipeline(options.pipeline), load_pipeline)
        if options.pipeline is not None
        else (_find_pipeline(dirs[0]), load_run_pipeline)
    )
    config = None if file is None else with_all_domains(load(file, options.overrides))
    if config is None and not options.tasks:
        raise ConfigError.at(
            "--pipeline",
            found=f"nothing, and {dirs[0]} is not in a run directory",
            wanted="a pipeline, for its domains and verifiers, or --lm-eval TASK",
            fix="give --pipeline FILE, or the name of a shipped one",
        )
    belongs = (("--domains", options.domains), ("--prompts", options.prompts), ("--set", options.overrides))
    unused = [name for name, value in belongs if value]
    if config is None and unused:
        raise ConfigError.at(
            unused[0],
            found=f"no pipeline that it belongs to: {dirs[0]} is not in a run directory",
            wanted="--pipeline beside it, or --lm-eval alone",
            fix=f"give --pipeline FILE, or leave {unused[0]} out",
        )
    domains = options.domains
    if config is not None and options.prompts:
        files = name_exam_files(options.prompts, domains or list(config.domains))
        evaluate_overrides = apply_overrides({}, options.overrides or []).get("evaluate") or {}
        config, domains = (
            use_exam_files(config, files, all_rows="samples" not in evaluate_overrides),
            domains or list(files),
        )
    settings = _add_tasks(config, options.tasks)
    harness.check_tasks(settings)
    evaluations = {} if config is None else evaluate_models(config, dirs, domains, tell)
    public: dict[str, TaskScores] = {}
    failure = None
    if settings.tasks:
        try:
            public = lm_eval_models(settings, dirs, "auto" if config is None else config.rollout.dtype, tell)
        except RunError as error:
            if not evaluations:
                raise
            failure = error
    tables = [*_make_tables(evaluations, options.side_by_side), *_public_tables(public)]
    return EvaluateOutput(_as_json(config, evaluations, public), tables, failure)


ALL_ROWS = sys.maxsize


def name_exam_files(values: Sequence[str], domains: Sequence[str]) -> dict[str, Path]:
    """Return domain -> file of questions, from the values of `--prompts`. Raises: ConfigError for a domain that is not there, or that
    does not follow from a file alone."""
    files: dict[str, Path] = {}
    for value in values:
        name, equals, path = value.partition("=")
        if not equals and len(domains) == 1:
            name, path = domains[0], value
        if not value or (equals and not path):
            raise ConfigError.at(
                f"--prompts {value}",
                found="no file",
                wanted="DOMAIN=FILE",
                fix=f"--prompts {name or domains[0]}=QUESTIONS.jsonl",
            )
        if not equals and len(domains) > 1:
            raise ConfigError.at(
                f"--prompts {value}",
                found=f"a file without a domain, and {len(domains)} domains: {', '.join(domains)}",
                wanted="DOMAIN=FILE: the domain says how answers are judged",
                fix=f"--prompts {domains[0]}={value}",
            )
        if name not in domains:
            raise ConfigError.at(
                f"--prompts {value}",
                found=f"the domain {name}",
                wanted=f"one of: {', '.join(domains)}",
                fix=did_you_mean(name, domains, "correct the name before the ="),
            )
        if name in files:
            raise ConfigError.at(
                f"--prompts {value}",
                found=f"{name} twice",
                wanted="one file a domain",
                fix="evaluate one after the other",
            )
        files[name] = Path(path).expanduser()
    return files


def use_exam_files(config: PipelineConfig, files: Mapping[str, Path], *, all_rows: bool) -> PipelineConfig:
    """Return the pipeline with these files as the exams of their domains: with `all_rows` every row of them, else as many as
    its exams have.

    A domain without an exam compares answers exactly.
    """
    domains = dict(config.domains)
    for name, file in files.items():
        exam = domains[name].eval
        verifier = {"verifier": exam.verifier} if exam else {}
        domains[name] = domains[name].model_copy(update={"eval": DomainEvalConfig(prompts=file, **verifier)})
    evaluate = config.evaluate.model_copy(update={"samples": ALL_ROWS} if all_rows else {})
    return config.model_copy(update={"domains": domains, "evaluate": evaluate})


def _evaluate_matrix(options: EvaluateOptions, target: str, tell: Tell) -> EvaluateOutput:
    """Evaluate every model on every domain of a pipeline or of a run directory; the latter gets the file."""
    paths = RunPaths(Path(target)) if RunPaths(Path(target)).is_run else None
    config = (
        load_pipeline(find_pipeline(target), options.overrides)
        if paths is None
        else load_run_pipeline(paths.pipeline, options.overrides)
    )
    other_keys = [] if paths is None else _list_other_keys(config, paths)
    if other_keys:
        tell(f"evaluation/matrix.json is not written: {', '.join(other_keys)} differ from the run's")
    matrix = evaluate_matrix(config, None if paths is None else paths.model, options.domains, tell)
    if paths is not None:
        matrix = _add_training(matrix, paths)
    data = matrix.as_json()
    if paths is not None and options.domains is None and not other_keys:
        paths.evaluation.mkdir(exist_ok=True)
        atomic_write_text(paths.matrix, json.dumps(data, indent=1))
    names = tuple(next(iter(matrix.models.values())).scores)
    columns = ("model (* teaches it)", *names, "own", "others")
    return EvaluateOutput(data, [(f"{config.name}: accuracy", columns, matrix_rows(matrix))])


def _list_other_keys(config: PipelineConfig, paths: RunPaths) -> list[str]:
    """Return the keys in which the pipeline's exams differ from the run's."""
    run_config = load_run_pipeline(paths.pipeline)
    return refused_keys(run_config.model_dump(mode="json"), config.model_dump(mode="json"))


def _add_training(matrix: Matrix, paths: RunPaths) -> Matrix:
    """Add the steps and tokens of the merged model to the matrix, if the run's own exam was of the same model."""
    after, merged = paths.evaluation_file("after"), matrix.models.get(MERGED)
    if merged is None or not after.exists():
        return matrix
    exam = Evaluation.load(after)
    if not set(merged.weights.values()) & set(exam.weights.values()):
        return matrix
    return replace(matrix, models={**matrix.models, MERGED: replace(merged, step=exam.step, tokens=exam.tokens)})


def _find_pipeline(model: Path) -> Path | None:
    """Return the pipeline of the run that made this model; None if no run did."""
    paths = RunPaths(model.absolute().parent)
    return paths.pipeline if paths.is_run else None


def _add_tasks(config: PipelineConfig | None, tasks: Sequence[str]) -> LMEvalConfig:
    settings = LMEvalConfig() if config is None else config.evaluate.lm_eval
    return settings.model_copy(update={"tasks": list(dict.fromkeys([*settings.tasks, *tasks]))})


def _as_json(
    config: PipelineConfig | None, evaluations: Mapping[str, Evaluation], public: Mapping[str, TaskScores]
) -> dict[str, Any]:
    """Return all results by model; for a single model also its name and accuracies at the top level."""
    data: dict[str, Any] = {"format": FORMAT, "pipeline": config.name if config else None}
    if len(evaluations) == 1:
        ((name, evaluation),) = evaluations.items()
        data |= {"model": name, "accuracy": evaluation.accuracy}
    return data | {
        "models": {name: asdict(evaluation) for name, evaluation in evaluations.items()},
        "lm_eval": dict(public),
    }


def _make_tables(evaluations: Mapping[str, Evaluation], side_by_side: bool) -> list[Table]:
    if side_by_side and evaluations:
        return [
            ("accuracy (95 % interval)", ("domain", *evaluations), side_by_side_rows(evaluations)),
            *_length_tables(evaluations),
        ]
    return [
        table
        for name, evaluation in evaluations.items()
        for table in ((name, score_columns(evaluation), score_rows(evaluation)), *_length_tables({name: evaluation}))
    ]


def _length_tables(evaluations: Mapping[str, Evaluation]) -> list[Table]:
    """Return the table of agents' success by the length of their tasks; none where no task says its moves."""
    rows = length_rows(evaluations)
    columns = ("domain", "right moves", "tasks", *evaluations)
    return [("success by the length of the task (95 % interval)", columns, rows)] if rows else []


def _public_tables(public: Mapping[str, TaskScores]) -> list[Table]:
    return [("lm-evaluation-harness", ("task", "metric", *public), harness.task_rows(public))] if public else []
