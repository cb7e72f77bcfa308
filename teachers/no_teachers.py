"""The pool that asks no teacher: it makes a row without a teacher's answer of every rollout.

It serves a run without teachers, one whose trainer ranks score by themselves (`opd.train.base_scoring`), and experts that only write
text, whose answers stand in the rollouts (`teachers.texts`).

The rows go through the same stream as scored rows. So the log, the feed of the ranks, the ranks and a resume need no
special case, and the loop is the same as that of a merge.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from opd.models.heads import HeadSource
from opd.payloads import answer_class
from opd.payloads.none import Unscored
from opd.records.types import LayoutProof, Rollout
from opd.stream.part_files import PartsDirectory
from opd.stream.schema import TargetRow, write_parts
from opd.stream.targets import ExpectedRow, StreamPart, TargetStream, TeacherRequest, make_part

NOBODY = "nobody"
"""Value of the column `teacher` of these rows."""
SENDER = "rollouts"
"""Sender of the rows, as errors name it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TeacherlessSpec:
    """Settings of the pool without teachers."""

    dtype: str
    """Type of hidden states that the stream's header states, although no row has hidden states."""
    max_quarantined: float
    """Share of the responses that may be left out. This pool leaves none out; `TeacherRequest` wants the number."""
    payload: str = "none"
    """Payload of the rows, one whose answers have no column."""


class TeacherlessPool:
    """Implements `opd.interfaces.TeacherPool`. It has no workers: rows are made when they are asked for."""

    def __init__(self, spec: TeacherlessSpec) -> None:
        self._spec = spec
        self.layouts: dict[str, LayoutProof] = {}

    def wait_ready(self) -> None:
        """Return at once."""

    def score(self, rollouts: Sequence[Rollout], directory: PartsDirectory | None = None) -> TargetStream:
        """Make one row of each rollout, in the order of the trainer's micro-batches: sorted by domain."""
        expected = {NOBODY: ExpectedRow(weight=1.0, head="")}
        request = TeacherRequest(
            rollouts=rollouts,
            teachers=dict.fromkeys(sorted({rollout.domain for rollout in rollouts}), expected),
            kind=(self._spec.dtype, self._spec.payload),
            max_quarantined=self._spec.max_quarantined,
            sender=SENDER,
        )
        return TargetStream(self._iterate_parts(rollouts), request, heads={})

    def heads(self) -> Mapping[str, HeadSource]:
        """Return no heads: no row names one."""
        return {}

    def _iterate_parts(self, rollouts: Sequence[Rollout]) -> Iterator[StreamPart]:
        ordered = sorted(rollouts, key=lambda rollout: rollout.domain)
        payload, answers = self._spec.payload, answer_class(self._spec.payload)
        assert issubclass(answers, Unscored), payload
        rows = ([TargetRow(rollout=rollout, teacher=NOBODY, answer=answers())] for rollout in ordered)
        for part in write_parts(rows, self._spec.dtype, payload, worker=0, broken={}, teachers=[NOBODY]):
            yield make_part(np.frombuffer(part, dtype=np.uint8), SENDER)
