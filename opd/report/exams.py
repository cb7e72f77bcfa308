"""Results of exams besides accuracy: lengths of answers, figures of episodes, and success by the length of the task."""

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
    """The result of one model on one domain of agents."""

    domain: str
    model: str
    """Name of the model, for people: a value of `MODELS`."""
    score: DomainScore


def latest_exam(run: RunFiles) -> Evaluation | None:
    """Return the exam of the merged model: the one at the end, or the newest so far if the merge is not finished."""
    if run.finished:
        return run.after  # None if its file is missing; an earlier exam would be one of another model
    return run.during[max(run.during)] if run.during else None


def answer_stats(evaluations: Mapping[str, Evaluation]) -> dict[str, dict[str, dict[str, float]]]:
    """Return domain -> model -> number of questions, mean_tokens, truncated, and how many verifiers `failed`; for domains with
    episodes also turns and invalid_calls."""
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
    """Return the report's key `by_length`: domain -> groups of tasks, the shortest first. Empty if no exam has such groups.

    A group has `fewest` and `most` right moves (null: no limit), the number of questions, and for `before`, `after` and
    `expert` the accuracy and `..._interval`; these are null if the model's file does not have them.
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
    """Return how a group of `success_by_length` is called for people, by its range of right moves."""
    return describe_span(group["fewest"], group["most"])


def _available_exams(run: RunFiles) -> dict[str, Evaluation]:
    """Return key of `MODELS` -> exam, for the exams that exist, in the order of `MODELS`."""
    exams = {"before": run.before, "after": latest_exam(run), "expert": run.expert}
    return {key: exam for key, exam in exams.items() if exam is not None}
