"""Results of exams beside the accuracy of a domain: how long answers were, how episodes went, and success by the length of the
task."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from opd.evaluation.lengths import align_lengths, describe_span
from opd.records.scores import DomainScore, Evaluation
from opd.report.run import RunFiles

MODELS = {"before": "student before", "after": "merged", "expert": "expert"}
"""Key of a model in report.json -> its name on the page."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentExam:
    """One model on one domain of agents."""

    domain: str
    model: str
    """Its name, for people."""
    score: DomainScore


def latest_exam(run: RunFiles) -> Evaluation | None:
    """Return the exam of the merged model: that at the end, or while the merge goes on the last so far."""
    if run.finished:
        return run.after  # None if its file is gone: an earlier exam is not that of the final model
    return run.during[max(run.during)] if run.during else None


def answer_stats(evaluations: Mapping[str, Evaluation]) -> dict[str, dict[str, dict[str, float]]]:
    """Return domain -> model -> questions, mean_tokens, truncated, and `failed` verifiers; of episodes also turns and
    invalid_calls."""
    stats: dict[str, dict[str, dict[str, float]]] = {}
    for name, evaluation in evaluations.items():
        for domain, score in evaluation.scores.items():
            played = {} if score.turns is None else {"turns": score.turns, "invalid_calls": score.invalid_calls}
            stats.setdefault(domain, {})[name] = {
                "questions": score.questions,
                "mean_tokens": score.mean_tokens,
                "truncated": score.truncated,
                "failed": score.failed,
                **played,
            }
    return stats


def success_by_length(run: RunFiles) -> dict[str, Any]:
    """`by_length`: domain -> groups of tasks, the shortest first; nothing if no exam has such groups.

    A group has fewest and most right moves (null: no limit), questions, and for `before`, `after` and `expert` the accuracy
    and `..._interval`, null where the model's file does not say it.
    """
    groups: dict[str, list[dict[str, Any]]] = {}
    for row in align_lengths(_available_exams(run)):
        group: dict[str, Any] = {"fewest": row.fewest, "most": row.most, "questions": row.questions}
        for key in MODELS:
            score = row.scores.get(key)
            group |= {
                key: None if score is None else score.accuracy,
                f"{key}_interval": None if score is None else [score.low, score.high],
            }
        groups.setdefault(row.domain, []).append(group)
    return {"by_length": groups} if groups else {}


def agent_exams(run: RunFiles) -> list[AgentExam]:
    """Return a row for each domain of agents and each model that took its exam."""
    exams = _available_exams(run)
    domains = dict.fromkeys(d for e in exams.values() for d, score in e.scores.items() if score.turns is not None)
    return [
        AgentExam(domain=domain, model=MODELS[key], score=evaluation.scores[domain])
        for domain in domains
        for key, evaluation in exams.items()
        if domain in evaluation.scores
    ]


def moves_label(group: Mapping[str, Any]) -> str:
    """Return the name of a group of `success_by_length`."""
    return describe_span(group["fewest"], group["most"])


def _available_exams(run: RunFiles) -> dict[str, Evaluation]:
    """Return the exams that there are, by key of `MODELS`, in its order."""
    exams = {"before": run.before, "after": latest_exam(run), "expert": run.expert}
    return {key: exam for key, exam in exams.items() if exam is not None}
