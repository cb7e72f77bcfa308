"""A scoring worker. Runs in a Ray actor; knows nothing of Ray."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

import numpy as np

from opd.losses.chunked import LogitRule
from opd.stream.heads import head_array
from opd.stream.schema import PartRecord, TargetRow, payload_bytes, write_stream
from opd.types import Rollout, Teacher
from teachers.probe import check_probe
from teachers.scorers import ScorerOptions, make_scorer

Group = tuple[Teacher, float, tuple[Rollout, ...]]
"""A teacher, its weight in the domain of these rows, and the rows."""

PART_ROWS = 256
PART_BYTES = 1 << 20
"""A part leaves with the batch that brings it to so many rows or bytes of payload: soon, and yet Arrow's 2 kB for each
part are little beside it."""


class TeacherWorker:
    """Scores groups of rows, one teacher after the other, while the next one is read ahead.

    It scores when it is asked for a part and not before: who asks decides how far it may be ahead.
    """

    def __init__(self, engine: str, options: ScorerOptions) -> None:
        self._options = options
        self._scorer = make_scorer(engine, options)
        self._parts: Iterator[np.ndarray] = iter(())

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

    def begin(self, groups: Sequence[Group], worker: int) -> None:
        """Take these groups' rows as the next step's; `next_part` scores them. `worker` numbers this one in the step."""
        self._parts = self._make_parts(groups, worker)

    def next_part(self) -> np.ndarray | None:
        """One Arrow stream (bytes as uint8) with the rows that follow, scored now; None after the last part."""
        return next(self._parts, None)

    def _make_parts(self, groups: Sequence[Group], worker: int) -> Iterator[np.ndarray]:
        """A part leaves with the batch that fills it; the last one, which may hold no row, ends the step."""
        broken: dict[str, str] = {}
        teachers: Counter[str] = Counter({teacher.name: 0 for teacher, _, _ in groups})
        rows: list[TargetRow] = []
        number = 0
        for scored in self._rows(groups, broken):
            rows += scored
            teachers.update(row.teacher for row in scored)
            if len(rows) >= PART_ROWS or payload_bytes(rows) >= PART_BYTES:
                yield self._encode(rows, PartRecord(worker=worker, number=number, broken=broken))
                broken.clear()
                rows, number = [], number + 1
        yield self._encode(rows, PartRecord(worker=worker, number=number, broken=broken, teachers=dict(teachers)))

    def _encode(self, rows: Sequence[TargetRow], record: PartRecord) -> np.ndarray:
        stream = write_stream([rows], self._options.dtype, self._options.payload, record)
        return np.frombuffer(stream, dtype=np.uint8)

    def _rows(self, groups: Sequence[Group], broken: dict[str, str]) -> Iterator[list[TargetRow]]:
        following = [group[0] for group in groups[1:]] + [None]
        for (teacher, weight, rollouts), upcoming in zip(groups, following, strict=False):
            batches = self._scorer.score(teacher, rollouts, broken)
            if upcoming is not None:
                self._scorer.prefetch(upcoming)
            for rows in batches:
                yield [row.weighted(weight) for row in rows]
