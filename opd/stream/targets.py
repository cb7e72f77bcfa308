"""The stream of a step's scored rows in the driver. They come in parts, while teachers still score, and each part is checked."""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from opd import cluster
from opd.errors import RunError
from opd.records.types import Rollout
from opd.stream.part_files import read_part
from opd.stream.part_summaries import PartSummary, RowSummary, make_summary
from opd.stream.rollouts import digest_rollout
from opd.stream.schema import PartRecord, StreamError, read_stream

if TYPE_CHECKING:  # it needs torch
    from opd.models.heads import HeadSource


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamPart:
    """Some scored rows of a step. The driver knows their summary; the trainer reads the rows themselves through the handle."""

    handle: Any
    """Handle of Ray's object store to the bytes, uint8 [bytes], of an Arrow stream of `opd.stream.schema`; or the path of a file of the
    target log that has them. `opd.stream.part_files.read_part` reads both."""
    summary: PartSummary
    driver_bytes: int
    """Bytes of the part and its summary that came through the driver."""

    @property
    def nbytes(self) -> int:
        return self.summary.nbytes

    @property
    def samples(self) -> tuple[str, ...]:
        """Sample id of each row."""
        return tuple(row.sample_id for row in self.summary.rows)


def make_part(raw: np.ndarray, sender: str) -> StreamPart:
    """Check the bytes of a part that came to the driver itself, and put them into the object store. Raises: StreamError.

    Ids are not checked against the vocabulary here: the ranks do that when they read the rows.
    """
    try:
        stream = read_stream(raw.data)
    except StreamError as error:
        raise StreamError(f"{sender}: {error}") from None
    summary = make_summary(stream.rows, stream.part, (stream.dtype, stream.payload), raw.nbytes)
    return StreamPart(handle=cluster.put_object(raw), summary=summary, driver_bytes=raw.nbytes)


Sink = Callable[[StreamPart | None], Callable[[], object] | None]
"""Function that is called with each part as it comes, and after the last part with None. It may return a function that waits until the
sink is done."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpectedRow:
    """Weight and output head that all rows of one teacher in one domain must have."""

    weight: float
    head: str
    """Content hash of the teacher's head; empty under payloads without hidden states."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TeacherRequest:
    """Request to the teachers in a step; their answers are checked against it."""

    rollouts: Sequence[Rollout]
    teachers: Mapping[str, Mapping[str, ExpectedRow]]
    """Domain -> teacher -> weight and head of its rows."""
    kind: tuple[str, str]
    """Dtype and payload of the stream."""
    kinds: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    """Domain -> dtype and payload of its rows, for domains whose teachers have another engine than the first ones."""
    max_quarantined: float
    """Largest share of the responses, 0..1, that may be left out."""
    sender: str = "teachers"
    """Sender of the rows, as errors name it."""


class TargetStream:
    """The scored rows of one step. The trainer takes parts until there are no more.

    Every row must be about a rollout that was sent, and come once from each teacher of its domain. At the end no row may be
    missing, and the workers' own counts of the rows by teacher must agree with what came.
    """

    def __init__(
        self,
        source: Iterator[StreamPart],
        request: TeacherRequest,
        *,
        heads: Mapping[str, HeadSource],
        restarted: Sequence[str] = (),
    ) -> None:
        """Keep the request. `source` yields parts as they are scored, and may add names to `restarted` meanwhile."""
        self.request = request
        self.heads = heads
        """Content hash -> source of the output head, for every head that the rows name. A rank reads those that it needs."""
        self.quarantined: dict[str, str] = {}
        """Sample id -> why a teacher's scores of it cannot be used. Such a sample is not trained. Complete once `arrived`."""
        self.restarted = restarted
        """Names of scoring workers that died and were started again."""
        self.arrived = False
        """True once all parts came and no row is missing."""
        self.busy_s = 0.0
        """Seconds from the request to the last part; 0 before the last part."""
        self.num_parts = 0
        self.nbytes = 0
        self.driver_bytes = 0
        """Bytes of parts and summaries that came through this process, the driver."""
        self._began = time.monotonic()
        self._source = source
        self._sent_rollouts = {r.sample_id: r for r in request.rollouts}
        self._digests = {r.sample_id: digest_rollout(r) for r in request.rollouts}
        self._missing = {(r.sample_id, name) for r in request.rollouts for name in request.teachers[r.domain]}
        self._rows_to_take = Counter(sample_id for sample_id, _ in self._missing)
        self._collected: deque[StreamPart] = deque()
        self._widths: dict[str, int] = {}
        """Domain of `TeacherRequest.kinds`, or empty for all others -> width of the answers, such as the K of a top-k."""
        self._records: dict[int, list[PartRecord]] = {}
        self._rows_by_teacher: dict[int, Counter[str]] = {}
        """Worker -> rows that came from it, by teacher."""
        self._sinks: list[Sink] = []
        self._sink_waits: list[Callable[[], object]] = []

    def add_sink(self, sink: Sink) -> None:
        """Call `sink` with every part that comes, before it is trained, and once more after the last part; see `Sink`.

        If the sink returns a function, `wait_for_sinks` calls it.
        """
        self._sinks.append(sink)

    def wait_for_sinks(self) -> None:
        """Wait until all sinks are done with the parts. Raises: what the sinks raise."""
        waits, self._sink_waits = self._sink_waits, []
        for wait in waits:
            wait()

    def read_part(self, part: StreamPart) -> np.ndarray:
        """Return the bytes of a part, uint8, in this process. Raises: WorkerDied if Ray or the part is gone."""
        self.driver_bytes += part.nbytes
        return read_part(part.handle)

    def wait_for_parts(self) -> None:
        """Wait for all parts; `take_part` returns them afterwards. Raises: what `take_part` raises."""
        while (part := self._next_part()) is not None:
            self._collected.append(part)

    def take_part(self) -> StreamPart | None:
        """Wait for the next part, and return it; None after the last one.

        Raises: StreamError for a part that does not answer the request; RunError if a teacher fails, or if more responses than
        `max_quarantined` allows could not be scored (a single one is always allowed).
        """
        part = self._collected.popleft() if self._collected else self._next_part()
        if part is not None:
            self._rows_to_take.subtract(part.samples)
        return part

    @property
    def collected(self) -> Sequence[StreamPart]:
        """Parts that came and were not taken yet."""
        return tuple(self._collected)

    def has_samples(self, sample_ids: Sequence[str]) -> bool:
        """Return True if, for each of these samples, every teacher's row was taken or the sample is quarantined."""
        return all(not self._rows_to_take[i] or i in self.quarantined for i in sample_ids)

    @property
    def rows(self) -> int:
        """Number of rows of the samples that are not quarantined; a sample has one row from each teacher of its domain."""
        return sum(
            len(self.request.teachers[r.domain]) for i, r in self._sent_rollouts.items() if i not in self.quarantined
        )

    def _next_part(self) -> StreamPart | None:
        if self.arrived:
            return None
        part = next(self._source, None)
        if part is None:
            # The check comes before the sinks hear of the end, because the target log then commits the step.
            self._check_complete()
            self.busy_s = time.monotonic() - self._began
            self._show_to_sinks(None)
            self.arrived = True
            return None
        summary = part.summary
        kind = (summary.dtype, summary.payload)
        if kind not in (self.request.kind, *self.request.kinds.values()):
            raise self._unwanted_kind("", kind, self.request.kind)
        for row in summary.rows:
            self._check_row(row, kind)
        self._note_part(summary.record, summary.rows)
        self._show_to_sinks(part)
        self.num_parts += 1
        self.nbytes += part.nbytes
        self.driver_bytes += part.driver_bytes
        return part

    def _show_to_sinks(self, part: StreamPart | None) -> None:
        self._sink_waits += [wait for sink in self._sinks if (wait := sink(part)) is not None]

    def _check_row(self, row: RowSummary, kind: tuple[str, str]) -> None:
        """Check that the row was requested, comes once, and is about the very tokens that were sent. `kind`: dtype and payload of its part.

        Raises: StreamError.
        """
        label = f"{self.request.sender}: row {row.sample_id} of teacher {row.teacher}"
        rollout = self._sent_rollouts.get(row.sample_id)
        if rollout is None or (row.sample_id, row.teacher) not in self._missing:
            raise StreamError(f"{label}: not asked for, or twice")
        expected = self.request.teachers[rollout.domain][row.teacher]
        # The weight travelled as float32.
        if row.weight != float(np.float32(expected.weight)) or row.head != expected.head:
            raise StreamError(f"{label}: another weight or head")
        if row.rollout != self._digests[row.sample_id]:
            raise StreamError(f"{label}: not the rollout that was sent")
        group = rollout.domain if rollout.domain in self.request.kinds else ""
        if kind != (wanted := self.request.kinds.get(rollout.domain, self.request.kind)):
            raise self._unwanted_kind(f"row {row.sample_id} of teacher {row.teacher}: ", kind, wanted)
        if row.width is not None and row.width != self._widths.setdefault(group, row.width):
            raise StreamError(f"{label}: an answer of width {row.width}, others have {self._widths[group]}")
        self._missing.remove((row.sample_id, row.teacher))

    def _unwanted_kind(self, of: str, kind: tuple[str, str], wanted: tuple[str, str]) -> StreamError:
        came, expected = (f"{payload} in {dtype}" for dtype, payload in (kind, wanted))
        return StreamError(f"{self.request.sender}: {of}{came} came, wanted {expected}")

    def _note_part(self, record: PartRecord, rows: Sequence[RowSummary]) -> None:
        records = self._records.setdefault(record.worker, [])
        # A worker's parts come in order, and none after the one that ended its step.
        if record.number != len(records) or (records and records[-1].teachers is not None):
            raise StreamError(
                f"{self.request.sender}: part {record.number} of worker {record.worker} came after {len(records)} of its parts"
            )
        records.append(record)
        self._rows_by_teacher.setdefault(record.worker, Counter()).update(row.teacher for row in rows)
        strange = sorted(set(record.broken) - set(self._sent_rollouts))
        if strange:
            raise StreamError(f"{self.request.sender}: {strange[0]} is said to be broken, but was not sent")
        self.quarantined |= record.broken
        refuse_many_broken(self.quarantined, len(self._sent_rollouts), self.request.max_quarantined)

    def _check_complete(self) -> None:
        """Check that the step is complete. Raises: StreamError if a worker's last part or a row is missing."""
        for worker, records in self._records.items():
            rows_by_teacher = records[-1].teachers
            if rows_by_teacher is None:
                raise StreamError(
                    f"{self.request.sender}: worker {worker} ends after {len(records)} parts without its end record"
                )
            # Unary `+` drops zeros: the worker's counts also have teachers of which no row came.
            if +Counter(rows_by_teacher) != +self._rows_by_teacher[worker]:
                raise StreamError(
                    f"{self.request.sender}: worker {worker} counts {dict(rows_by_teacher)} rows, {dict(self._rows_by_teacher[worker])} came"
                )
        # A quarantined response lacks the row of at least one teacher.
        missing = sorted(sample_id for sample_id, _ in self._missing if sample_id not in self.quarantined)
        if missing:
            raise StreamError(f"{self.request.sender}: {len(missing)} rows are missing, first {missing[0]}")


def refuse_many_broken(broken: Mapping[str, str], num_rollouts: int, max_share: float) -> None:
    """Refuse a step in which more than the share `max_share` of the responses are broken; a single one is always allowed.

    Raises: RunError.
    """
    if len(broken) > max(1, max_share * num_rollouts):
        sample_id, reason = next(iter(broken.items()))
        raise RunError(
            f"{len(broken)} of {num_rollouts} responses could not be scored, first {sample_id}: {reason}; "
            f"teachers.max_quarantined is {max_share}"
        )
