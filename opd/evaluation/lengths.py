"""Scores by the length of the task, to show how they fall as more moves in a row have to be right.

The length is that of the task's own solution (`metadata.moves`), not that of the episode: a model that is lost plays on and on, so the
number of its turns says how good it is, and not how hard the task was.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import inf
from statistics import fmean
from typing import Any

from opd.evaluation.statistics import confidence_interval
from opd.records.scores import Evaluation, LengthScore

BUCKETS: tuple[tuple[int, int | None], ...] = ((1, 3), (4, 7), (8, 14), (15, None))
"""Fewest and most moves in the solution of a group of tasks, both included; None: no limit. Fixed, so that runs can be compared."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LengthRow:
    """Scores of several models on the tasks of one group in one domain."""

    domain: str
    fewest: int
    most: int | None
    questions: int
    scores: Mapping[str, LengthScore]
    """Model -> its score; a model whose file has none is left out."""

    @property
    def moves(self) -> str:
        """The group in words."""
        return describe_span(self.fewest, self.most)


def right_moves(metadata: Mapping[str, Any]) -> int | None:
    """Return the number of moves of the task's solution; None if its row has no such number."""
    moves = metadata.get("moves")
    return moves if type(moves) is int and moves > 0 else None


def by_length(scored: Sequence[tuple[int | None, Sequence[float]]]) -> tuple[LengthScore, ...]:
    """Return the scores of the groups that have a task, the shortest first. `scored`: for each task the moves of its solution (None if
    they are unknown: the task is then in no group) and the scores of its answers, 0..1."""
    groups = []
    for fewest, most in BUCKETS:
        task_scores = [
            s for moves, s in scored if moves is not None and fewest <= moves <= (inf if most is None else most)
        ]
        if task_scores:
            low, high = confidence_interval(task_scores)
            accuracy = fmean(map(fmean, task_scores))
            groups.append(
                LengthScore(fewest=fewest, most=most, questions=len(task_scores), accuracy=accuracy, low=low, high=high)
            )
    return tuple(groups)


def align_lengths(models: Mapping[str, Evaluation]) -> list[LengthRow]:
    """Return a row for each domain and group of tasks that any of the models has a score for. `models` maps a name to its
    evaluation."""
    parts: dict[str, dict[tuple[int, int | None], dict[str, LengthScore]]] = {}
    for name, evaluation in models.items():
        for domain, score in evaluation.scores.items():
            groups = parts.setdefault(domain, {})
            for length_score in score.by_length:
                groups.setdefault((length_score.fewest, length_score.most), {})[name] = length_score
    return [
        LengthRow(
            domain=domain,
            fewest=fewest,
            most=most,
            questions=max(length_score.questions for length_score in scores.values()),
            scores=scores,
        )
        for domain, groups in parts.items()
        for (fewest, most), scores in sorted(groups.items(), key=lambda group: group[0][0])
    ]


def describe_span(fewest: int, most: int | None) -> str:
    """Return a group in words: `4-7`, `15 and more`."""
    return f"{fewest} and more" if most is None else f"{fewest}-{most}"
