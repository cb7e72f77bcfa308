"""Evaluations as rows of text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean

from opd.evaluation.evaluator import BEFORE
from opd.evaluation.lengths import align_lengths
from opd.records.scores import Evaluation
from opd.text import or_dash
from pipelines.evaluation.matrix import Matrix


def score_rows(found: Evaluation) -> list[tuple[str, ...]]:
    """Return rows of domain, accuracy, 95 % interval, questions x answers, then pass@k for each k above 1, length, truncated,
    failed; turns and invalid calls where a domain has episodes."""
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
            *((or_dash(s.turns, ".1f"), str(s.invalid_calls)) if _has_episodes(found) else ()),
        )
        for domain, s in found.scores.items()
    ]


def score_columns(found: Evaluation) -> tuple[str, ...]:
    """Return the headings of `score_rows`."""
    first = next(iter(found.scores.values()))
    passes = (f"pass@{k}" for k in first.pass_at if k != "1")
    acting = ("turns", "invalid calls") if _has_episodes(found) else ()
    return (
        "domain",
        "accuracy",
        "95 % interval",
        "questions",
        *passes,
        "tokens",
        "truncated",
        "verifier failed",
        *acting,
    )


def _has_episodes(found: Evaluation) -> bool:
    return any(score.turns is not None for score in found.scores.values())


def side_by_side_rows(models: Mapping[str, Evaluation]) -> list[tuple[str, ...]]:
    """Return rows of domain, then each model's accuracy with the 95 % interval; the last row has the means."""
    first = next(iter(models.values()))
    rows = [
        (domain, *(f"{(s := m.scores[domain]).accuracy:.3f} ({s.low:.2f} to {s.high:.2f})" for m in models.values()))
        for domain in first.scores
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
    before = matrix.models[BEFORE].accuracy

    def gain(found: Evaluation, domains: Sequence[str]) -> str:
        return f"{fmean(found.accuracy[d] - before[d] for d in domains):+.3f}" if domains else "-"

    rows = []
    for name, found in matrix.models.items():
        own = [d for d in found.scores if d in matrix.own[name]]
        others = [d for d in found.scores if d not in own] if name != BEFORE else []
        marked = (f"{value:.2f}{'*' if domain in own else ''}" for domain, value in found.accuracy.items())
        rows.append((name, *marked, gain(found, own), gain(found, others)))
    return rows
