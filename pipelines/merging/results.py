"""Note in a measured result which model it belongs to, and withdraw results when a merge goes on after its end.

A result records the steps, response tokens and weights of its model, so that no table shows a result of another model as if
it were of this one.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from experts.bound_files import model_digest
from experts.weight_files import weight_hashes
from opd.evaluation.evaluator import MERGED
from opd.files import atomic_write_text
from opd.records.scores import Evaluation
from opd.report import write_report
from opd.run.metrics import MetricsFile, count_steps_and_tokens
from opd.run.paths import RunPaths, step_name
from pipelines.evaluation.lm_eval import lm_eval_text, lm_eval_weights, read_lm_eval

T = TypeVar("T")


def read_progress(metrics: Path) -> tuple[int, int]:
    """Return the steps and response tokens that a metrics file records."""
    return count_steps_and_tokens(MetricsFile(metrics).read())


def add_model_digest(evaluation: Evaluation, model: Path, steps: int, tokens: int) -> Evaluation:
    """Add steps, tokens and digest of the merged model to its exam. Reads the model's weights once for their hash."""
    digest = model_digest(model, weight_hashes(model))
    return replace(evaluation, step=steps, tokens=tokens, weights=dict.fromkeys(evaluation.scores, digest))


def withdraw_results(paths: RunPaths, start_step: int, steps: int) -> None:
    """Withdraw results that are no longer true when a merge goes on from step `start_step` to step `steps`.

    Exams, alarms and traces of later steps are deleted. If the merge had come to an end before, the final exam becomes an exam
    during the merge, unless the run goes back to an earlier step; results of lm-evaluation-harness and the report are
    withdrawn, and the report page says that the merge goes on. The model of that end stays until there is a new one.
    """
    for files_by_step in (paths.evaluations_by_step(), paths.alarms_by_step(), paths.traces_by_step()):
        for step, file in files_by_step.items():
            if step > start_step:
                file.unlink()
    if start_step >= steps:
        return
    after = paths.evaluation_file("after")
    if after.exists():
        evaluation = Evaluation.load(after)
        end_step = evaluation.step or _read_steps(paths.report)
        if end_step is not None and end_step <= start_step:
            replace(evaluation, step=end_step).save(paths.evaluation_file(step_name(end_step)))
        after.unlink()
    scores, weights = read_lm_eval(paths.lm_eval), lm_eval_weights(paths.lm_eval)
    if MERGED in scores:
        atomic_write_text(paths.lm_eval, lm_eval_text(_without_merged(scores), _without_merged(weights)))
    if paths.report.exists():
        paths.report.unlink()
        write_report(paths.root)  # without report.json the page says that the run is unfinished


def _without_merged(by_model: Mapping[str, T]) -> dict[str, T]:
    return {name: value for name, value in by_model.items() if name != MERGED}


def _read_steps(report: Path) -> int | None:
    """Return the steps of a run according to its report, for evaluations of an older release, which do not record them."""
    if not report.exists():
        return None
    steps: int | None = json.loads(report.read_text(encoding="utf-8")).get("steps")
    return steps
