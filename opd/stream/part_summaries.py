"""Summaries of parts: what the driver gets to know of a part of the target stream, which is everything but the teachers' answers.

A step's answers are gigabytes. They go from the scoring workers to the trainer ranks through Ray's object store, and into the target
log by the workers' own hands (`opd.stream.part_files`), so the driver sees a few hundred bytes for each row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from pydantic import TypeAdapter, ValidationError

from opd.stream.rollouts import digest_rollout
from opd.stream.schema import PartRecord, StreamError, TargetRow


@dataclass(frozen=True, slots=True, kw_only=True)
class RowSummary:
    """A scored row without its answer."""

    sample_id: str
    teacher: str
    weight: float
    """Weight of the teacher in the row's domain, rounded to float32, in which it travels."""
    head: str
    """Content hash of the teacher's head; empty under payloads without hidden states."""
    width: int | None
    """Values for each token where all rows of a stream must have equally many, such as the K of a top-k."""
    rollout: str
    """`digest_rollout` of the rollout that was scored."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PartSummary:
    """A part without the answers of its rows."""

    record: PartRecord
    dtype: str
    payload: str
    rows: tuple[RowSummary, ...]
    nbytes: int
    """Bytes of the part's Arrow stream."""
    file: str = ""
    """BLAKE3 of the file of the target log that holds the part; empty if the scoring worker did not write one."""

    def to_json(self) -> bytes:
        return _SUMMARY.dump_json(self)


_SUMMARY = TypeAdapter(PartSummary)


def make_summary(
    rows: Sequence[TargetRow], record: PartRecord, kind: tuple[str, str], nbytes: int, file: str = ""
) -> PartSummary:
    """Make the summary of a part. `kind`: dtype and payload of its stream."""
    return PartSummary(
        record=record,
        dtype=kind[0],
        payload=kind[1],
        rows=tuple(
            RowSummary(
                sample_id=row.rollout.sample_id,
                teacher=row.teacher,
                weight=float(np.float32(row.weight)),
                head=row.answer.head_key(),
                width=row.answer.width(row.rollout.num_trained),
                rollout=digest_rollout(row.rollout),
            )
            for row in rows
        ),
        nbytes=nbytes,
        file=file,
    )


def parse_summary(text: bytes) -> PartSummary:
    """Inverse of `PartSummary.to_json`. Raises: StreamError for a text that it cannot have written."""
    try:
        return _SUMMARY.validate_json(text)
    except ValidationError as error:
        raise StreamError(f"target stream: the summary of a part is broken: {error.errors()[0]['msg']}") from None
