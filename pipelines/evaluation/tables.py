"""Evaluations as rows of text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean

from opd.evaluation.evaluator import BEFORE
from opd.evaluation.lengths import align_lengths
from opd.records.scores import Evaluation
from opd.text import format_or_dash
from pipelines.evaluation.matrix import Matrix


def score_rows(evaluation: Evaluation) -> list[tuple[str, ...]]:
    """Return rows of domain, accuracy, 95 % interval, questions x answers, then pass@k for each k above 1, length, truncated,
    failed; turns and invalid calls where a domain has episodes; tokens of a pass where a draft guessed."""
    return [
        (
            domain,
            f"{s.accuracy:.3f}",
            f"{s.low:.3f} to {s.high:.3f}",
            f"{s.questions} x {s.samples}" if s.samples > 1 else str(s.questions),
            *(f"{value:.3f}" for k, value in s.pass_at.items() if k != "1"),
            f"{s.mean_tokens:.1f}",
            f"{s.truncated:.0%}",
            str(s.failed),
            *((format_or_dash(s.turns, ".1f"), str(s.invalid_calls)) if _has_episodes(evaluation) else ()),
            *((format_or_dash(s.accepted_length, ".2f"),) if _has_draft(evaluation) else ()),
        )
        for domain, s in evaluation.scores.items()
    ]


def score_columns(evaluation: Evaluation) -> tuple[str, ...]:
    """Return the headings of `score_rows`."""
    score = next(iter(evaluation.scores.values()))
    passes = (f"pass@{k}" for k in score.pass_at if k != "1")
    episode_columns = ("turns", "invalid calls") if _has_episodes(evaluation) else ()
    return (
        "domain",
        "accuracy",
        "95 % interval",
        "questions",
        *passes,
        "tokens",
        "truncated",
        "verifier failed",
        *episode_columns,
        *(("tokens of a pass",) if _has_draft(evaluation) else ()),
    )


def _has_episodes(evaluation: Evaluation) -> bool:
    return any(score.turns is not None for score in evaluation.scores.values())


def _has_draft(evaluation: Evaluation) -> bool:
    return any(score.accepted_length is not None for score in evaluation.scores.values())


def side_by_side_rows(models: Mapping[str, Evaluation]) -> list[tuple[str, ...]]:
    """Return rows of domain, then each model's accuracy with the 95 % interval; the last row has the means."""
    evaluation = next(iter(models.values()))
    rows = [
        (domain, *(f"{(s := m.scores[domain]).accuracy:.3f} ({s.low:.2f} to {s.high:.2f})" for m in models.values()))
        for domain in evaluation.scores
    ]
    return [*rows, ("mean", *(f"{fmean(m.accuracy.values()):.3f}" for m in models.values()))]


def length_rows(models: Mapping[str, Evaluation]) -> list[tuple[str, ...]]:
    """Return rows of domain, right moves of the task, tasks, then each model's success on them with the 95 % interval; no row
    for a domain whose tasks do not say their moves."""
    return [
        (
            row.domain,
            row.moves,
            str(row.questions),
            *(
                f"{s.accuracy:.3f} ({s.low:.2f} to {s.high:.2f})" if (s := row.scores.get(name)) else "-"
                for name in models
            ),
        )
        for row in align_lengths(models)
    ]


def matrix_rows(matrix: Matrix) -> list[tuple[str, ...]]:
    """Return rows of model, its accuracy on each domain (`*`: one that it teaches), and the mean gained (+) or lost (-) against
    the student before on its own domains and on the others."""
    student_accuracy = matrix.models[BEFORE].accuracy

    def gain(evaluation: Evaluation, domains: Sequence[str]) -> str:
        return f"{fmean(evaluation.accuracy[d] - student_accuracy[d] for d in domains):+.3f}" if domains else "-"

    rows = []
    for name, evaluation in matrix.models.items():
        taught = [d for d in evaluation.scores if d in matrix.own[name]]
        other_domains = [d for d in evaluation.scores if d not in taught] if name != BEFORE else []
        cells = (f"{value:.2f}{'*' if domain in taught else ''}" for domain, value in evaluation.accuracy.items())
        rows.append((name, *cells, gain(evaluation, taught), gain(evaluation, other_domains)))
    return rows
