"""Evaluate models on tasks of lm-evaluation-harness, one process for each model, and store a merge's scores."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from experts.adapter import inspect_expert
from experts.bound_files import model_digest
from experts.weight_files import weight_hashes
from opd.config import PipelineConfig
from opd.config.evaluate import LMEvalConfig
from opd.evaluation.evaluator import BEFORE, MERGED
from opd.evaluation.harness import TaskScores, check_tasks, run_tasks
from opd.files import atomic_write_text
from opd.records.scores import FORMAT
from opd.text import Tell
from pipelines.evaluation.models import model_directory
from pipelines.inputs.read import as_teacher


def lm_eval_models(settings: LMEvalConfig, model_dirs: Sequence[Path], dtype: str, tell: Tell) -> dict[str, TaskScores]:
    """Return path of a model -> its scores. Raises: OpdError before anything runs; RunError if the harness fails."""
    check_tasks(settings)
    inspections = {path: inspect_expert(path) for path in dict.fromkeys(model_dirs)}
    scores_by_model = {}
    for path, (info, adapter) in inspections.items():
        model = as_teacher(str(path), info, adapter)
        tell(f"{path}: lm-evaluation-harness, {', '.join(settings.tasks)}")
        with model_directory(model) as directory:
            scores_by_model[str(path)] = run_tasks(settings, directory, dtype)
    return scores_by_model


def lm_eval_merge(config: PipelineConfig, merged: Path, file: Path) -> None:
    """Evaluate the student before and the merged model on the pipeline's tasks, if it has any, and write `file`. The student
    is not evaluated again if `file` has it."""
    settings = config.evaluate.lm_eval
    if settings.tasks:
        models = {BEFORE: config.student.model, MERGED: merged}
        weights = {name: model_digest(path, weight_hashes(path)) for name, path in models.items()}
        stored_scores = (
            read_lm_eval(file) if lm_eval_weights(file).get(BEFORE, weights[BEFORE]) == weights[BEFORE] else {}
        )
        scores_by_model = {name: scores for name, scores in stored_scores.items() if name == BEFORE}
        scores_by_model |= {
            n: run_tasks(settings, path, config.rollout.dtype) for n, path in models.items() if n not in scores_by_model
        }
        atomic_write_text(file, lm_eval_text(scores_by_model, weights))


def lm_eval_text(models: Mapping[str, TaskScores], weights: Mapping[str, str]) -> str:
    """Return the text of the file of `lm_eval_merge`: scores by model, and digests of the models."""
    return json.dumps({"format": FORMAT, "models": models, "weights": weights}, indent=1)


def read_lm_eval(file: Path) -> dict[str, TaskScores]:
    """Read the scores by model; empty without a file."""
    models: dict[str, TaskScores] = _lm_eval_file(file).get("models", {})
    return models


def lm_eval_weights(file: Path) -> dict[str, str]:
    """Read the digests by model; empty without a file, or if an older release wrote it."""
    weights: dict[str, str] = _lm_eval_file(file).get("weights", {})
    return weights


def _lm_eval_file(file: Path) -> dict[str, Any]:
    data: dict[str, Any] = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
    return data
