"""A scoring worker. Runs in a Ray actor; knows nothing of Ray."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from opd.models.heads import HeadSource, head_array
from opd.records.types import LayoutProof, Rollout, Teacher
from opd.stream.schema import TargetRow, write_parts
from teachers.probe import check_probe
from teachers.scorers import ScorerOptions, make_scorer

TeacherRows = tuple[Teacher, float, tuple[Rollout, ...]]
"""A teacher, its weight in the domain of these rows, and the rows."""


class TeacherWorker:
    """Scores groups of rows, one teacher after the other, and meanwhile reads the next teacher ahead.

    It scores only when it is asked for a part, so the caller decides how far ahead of the trainer it may be.
    """

    def __init__(self, engine: str, options: ScorerOptions) -> None:
        self._options = options
        self._scorer = make_scorer(engine, options)
        self._parts: Iterator[np.ndarray] = iter(())

    def describe_head(self, teacher: Teacher) -> HeadSource:
        """Return the teacher's head as a source without a handle.

        Reading the head also shows that the teacher can be used: that its weights fit, or that its server answers.

        Raises: RunError if the teacher cannot be used, or if it is not the model that was registered.
        """
        scorer = self._scorer
        head = HeadSource(key=scorer.head_key(teacher), rule=scorer.head_rule(teacher), file=scorer.head_file(teacher))
        check_probe(self._scorer, teacher, self._options)
        return head

    def prove_layout(self, teacher: Teacher) -> LayoutProof | None:
        """Return how rows of this teacher share a forward pass, see `Scorer.layout`. Raises: RunError if they cannot."""
        return self._scorer.layout(teacher)

    def read_head(self, teacher: Teacher) -> np.ndarray:
        """Return the head's matrix, [V, D], as the array that goes into the object store."""
        return head_array(self._scorer.head(teacher))

    def begin_rows(self, groups: Sequence[TeacherRows], worker: int) -> None:
        """Prepare to score these groups, the share of the next step; `next_part` then scores them.

        `worker` is the number that marks this worker's parts in the stream.
        """
        self._parts = self._make_parts(groups, worker)

    def next_part(self) -> np.ndarray | None:
        """Return one Arrow stream (bytes as uint8) with the rows that follow, scored now; None after the last part."""
        return next(self._parts, None)

    def _make_parts(self, groups: Sequence[TeacherRows], worker: int) -> Iterator[np.ndarray]:
        broken: dict[str, str] = {}
        names = [teacher.name for teacher, _, _ in groups]
        rows = self._score_rows(groups, broken)
        options = self._options
        for part in write_parts(rows, options.dtype, options.payload, worker=worker, broken=broken, teachers=names):
            yield np.frombuffer(part, dtype=np.uint8)

    def _score_rows(self, groups: Sequence[TeacherRows], broken: dict[str, str]) -> Iterator[list[TargetRow]]:
        next_teachers = [group[0] for group in groups[1:]] + [None]
        for (teacher, weight, rollouts), next_teacher in zip(groups, next_teachers, strict=False):
            batches = self._scorer.score(teacher, rollouts, broken)
            # Not before `score`, which loads this teacher: memory is shared between the one in use and the next one.
            if next_teacher is not None:
                self._scorer.prefetch(next_teacher)
            for rows in batches:
                yield [row.with_weight(weight) for row in rows]
