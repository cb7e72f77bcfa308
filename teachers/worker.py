"""A scoring worker. Runs in a Ray actor; knows nothing of Ray."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from opd.losses.chunked import LogitRule
from opd.stream.heads import head_array
from opd.stream.schema import TargetRow, write_stream
from opd.types import Rollout, Teacher
from teachers.probe import check_probe
from teachers.scorers import ScorerOptions, make_scorer

Group = tuple[Teacher, float, tuple[Rollout, ...]]
"""A teacher, its weight in the domain of these rows, and the rows."""


class TeacherWorker:
    """Scores groups of rows, one teacher after the other, while the next one is read ahead."""

    def __init__(self, engine: str, options: ScorerOptions) -> None:
        self._options = options
        self._scorer = make_scorer(engine, options)
        self._broken: dict[str, str] = {}

    def describe(self, teacher: Teacher) -> tuple[str, LogitRule]:
        """Content hash and logit rule of the teacher's head; asking for them also proves that the teacher can be used:
        that its weights fit, or that its server answers.

        Raises: RunError if it cannot, or if it is not the one that was registered.
        """
        described = self._scorer.head_key(teacher), self._scorer.head_rule(teacher)
        check_probe(self._scorer, teacher, self._options)
        return described

    def head(self, teacher: Teacher) -> np.ndarray:
        """[V, D] the head, for the object store."""
        return head_array(self._scorer.head(teacher))

    def score(self, groups: Sequence[Group]) -> np.ndarray:
        """One Arrow stream (bytes as uint8) with all rows of all groups that could be scored."""
        self._broken = {}
        stream = write_stream(self._rows(groups), self._options.dtype, self._options.payload)
        return np.frombuffer(stream, dtype=np.uint8)

    def broken(self) -> dict[str, str]:
        """Sample id -> why the last `score` left it out."""
        return self._broken

    def _rows(self, groups: Sequence[Group]) -> Iterator[list[TargetRow]]:
        following = [group[0] for group in groups[1:]] + [None]
        for (teacher, weight, rollouts), upcoming in zip(groups, following, strict=False):
            batches = self._scorer.score(teacher, rollouts, self._broken)
            if upcoming is not None:
                self._scorer.prefetch(upcoming)
            for rows in batches:
                yield [row.weighted(weight) for row in rows]
