"""What `opd evaluate` does with its arguments: which pipeline, which models, and the answer as data and as tables."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from opd.config import PipelineConfig, load_pipeline
from opd.config.evaluate import LMEvalConfig
from opd.errors import ConfigError
from opd.evaluation import harness
from opd.evaluation.evaluator import MERGED
from opd.evaluation.harness import TaskScores
from opd.evaluation.scores import FORMAT, Evaluation
from opd.files import atomic_write_text
from pipelines.build import RunPaths
from pipelines.catalog import find
from pipelines.evaluate import (
    Matrix,
    Tell,
    compare_rows,
    evaluate_matrix,
    evaluate_models,
    lm_eval_models,
    matrix_rows,
    score_columns,
    score_rows,
    with_all_domains,
)
from pipelines.resume import refused_keys

Table = tuple[str, tuple[str, ...], list[tuple[str, ...]]]
"""Title, headings, rows."""


@dataclass(frozen=True, slots=True)
class Examined:
    """The answer to one call of `opd evaluate`."""

    data: dict[str, Any]
    """For `--json` and `--output`."""
    tables: list[Table]


def examine_models(
    models: Sequence[Path],
    pipeline: str | None,
    domains: Sequence[str] | None,
    tasks: Sequence[str],
    overrides: list[str] | None,
    compare: bool,
    tell: Tell,
) -> Examined:
    """Models on a pipeline's exams, on its public tasks and on `tasks`; on `tasks` alone if there is no pipeline.

    `compare` puts the models side by side in one table. Raises: OpdError before any compute, RunError during it.
    """
    dirs = [path / "model" if _is_run(path) else path for path in models]
    file = find(pipeline) if pipeline is not None else _pipeline_of(dirs[0])
    config = None if file is None else with_all_domains(load_pipeline(file, overrides))
    if config is None and not tasks:
        raise ConfigError.at(
            "--pipeline",
            found=f"nothing, and {dirs[0]} is not in a run directory",
            wanted="a pipeline, for its domains and verifiers, or --lm-eval TASK",
            fix="give --pipeline FILE, or the name of a shipped one",
        )
    settings = _with_tasks(config, tasks)
    harness.check_tasks(settings)
    found = {} if config is None else evaluate_models(config, dirs, domains, tell)
    public: dict[str, TaskScores] = {}
    if settings.tasks:
        public = lm_eval_models(settings, dirs, "auto" if config is None else config.rollout.dtype, tell)
    return Examined(_as_json(config, found, public), [*_tables(found, compare), *_public_tables(public)])


def examine_matrix(where: str, domains: Sequence[str] | None, overrides: list[str] | None, tell: Tell) -> Examined:
    """Everyone on every domain, for a pipeline or for a run directory, into which `evaluation/matrix.json` goes.

    Raises: OpdError before any compute, RunError during it.
    """
    run_dir = Path(where) if _is_run(Path(where)) else None
    config = load_pipeline(find(where) if run_dir is None else run_dir / "pipeline.yaml", overrides)
    other = [] if run_dir is None else _other_keys(config, run_dir)
    if other:
        tell(f"evaluation/matrix.json is not written: {', '.join(other)} differ from the run's")
    matrix = evaluate_matrix(config, None if run_dir is None else run_dir / "model", domains, tell)
    if run_dir is not None:
        matrix = _of_the_run(matrix, RunPaths(run_dir))
    data = matrix.as_json()
    if run_dir is not None and domains is None and not other:
        (run_dir / "evaluation").mkdir(exist_ok=True)
        atomic_write_text(run_dir / "evaluation" / "matrix.json", json.dumps(data, indent=1))
    names = tuple(next(iter(matrix.models.values())).scores)
    columns = ("model (* teaches it)", *names, "own", "others")
    return Examined(data, [(f"{config.name}: accuracy", columns, matrix_rows(matrix))])


def _other_keys(config: PipelineConfig, run_dir: Path) -> list[str]:
    """Those with which this is no exam of the run."""
    own = load_pipeline(run_dir / "pipeline.yaml")
    return refused_keys(own.model_dump(mode="json"), config.model_dump(mode="json"))


def _of_the_run(matrix: Matrix, paths: RunPaths) -> Matrix:
    """With the steps and tokens of the merged model, if it is the one that the run's own exam was of."""
    after, merged = paths.evaluation / "after.json", matrix.models.get(MERGED)
    if merged is None or not after.exists():
        return matrix
    own = Evaluation.load(after)
    if not set(merged.weights.values()) & set(own.weights.values()):
        return matrix
    return replace(matrix, models={**matrix.models, MERGED: replace(merged, step=own.step, tokens=own.tokens)})


def _is_run(path: Path) -> bool:
    """Whether it is a run directory of `opd merge`; a pipeline alone may lie anywhere."""
    return (path / "manifest.json").is_file() and (path / "pipeline.yaml").is_file()


def _pipeline_of(model: Path) -> Path | None:
    """The pipeline of the run whose model it is."""
    root = model.absolute().parent
    return root / "pipeline.yaml" if _is_run(root) else None


def _with_tasks(config: PipelineConfig | None, tasks: Sequence[str]) -> LMEvalConfig:
    settings = LMEvalConfig() if config is None else config.evaluate.lm_eval
    return settings.model_copy(update={"tasks": list(dict.fromkeys([*settings.tasks, *tasks]))})


def _as_json(
    config: PipelineConfig | None, found: Mapping[str, Evaluation], public: Mapping[str, TaskScores]
) -> dict[str, Any]:
    """Everything by model; of a single one also its name and accuracies at the top."""
    data: dict[str, Any] = {"format": FORMAT, "pipeline": config.name if config else None}
    if len(found) == 1:
        ((name, one),) = found.items()
        data |= {"model": name, "accuracy": one.accuracy}
    return data | {"models": {name: asdict(one) for name, one in found.items()}, "lm_eval": dict(public)}


def _tables(found: Mapping[str, Evaluation], compare: bool) -> list[Table]:
    if compare and found:
        return [("accuracy (95 % interval)", ("domain", *found), compare_rows(found))]
    return [(name, score_columns(one), score_rows(one)) for name, one in found.items()]


def _public_tables(public: Mapping[str, TaskScores]) -> list[Table]:
    return [("lm-evaluation-harness", ("task", "metric", *public), harness.table_rows(public))] if public else []
