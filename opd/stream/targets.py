"""A step's scored rows in the driver: they come part by part while teachers still score, and each part is checked."""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import numpy as np

from opd import cluster
from opd.errors import RunError
from opd.records.types import Rollout
from opd.stream.schema import PartRecord, StreamError, TargetRow, read_stream

if TYPE_CHECKING:  # it needs torch
    from opd.models.heads import HeadSource


Sink = Callable[[PartRecord | None, np.ndarray | None], Callable[[], object] | None]
"""Gets record and bytes of each part as it comes, then None for both; may return a function that waits until it is done."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpectedRow:
    """The weight and head that every row of one teacher must have in a domain."""

    weight: float
    head: str
    """Content hash of the teacher's head; empty under payloads without hidden states."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TeacherRequest:
    """The request to the teachers in a step, against which the answers are checked."""

    rollouts: Sequence[Rollout]
    teachers: Mapping[str, Mapping[str, ExpectedRow]]
    """Domain -> teacher -> weight and head of its rows."""
    kind: tuple[str, str]
    """Dtype and payload."""
    max_quarantined: float
    """Share of the responses that may be left out."""
    sender: str = "teachers"
    """Name of the answering side in errors."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamPart:
    """Some rows of a step. The driver has checked them and keeps none; the trainer reads them."""

    handle: Any
    """Leads to the bytes [uint8] of one Arrow stream of `opd.stream.schema`."""
    nbytes: int
    samples: tuple[str, ...]
    """The sample of each row."""


class TargetStream:
    """One step's targets. The trainer takes parts until there are no more.

    Every row is compared with the rollout that was sent, and must come once, from a teacher of its domain. At the end none may
    be missing: the rows that came are compared with the scoring workers' counts, by teacher.
    """

    def __init__(
        self,
        source: Iterator[Any],
        request: TeacherRequest,
        *,
        heads: Mapping[str, HeadSource],
        restarted: Sequence[str] = (),
    ) -> None:
        """Take the request. `source` yields handles to parts as they are scored, and may add to `restarted`."""
        self.request = request
        self.heads = heads
        """Content hash -> head, for every head that the rows name. A rank fetches what it needs and does not hold."""
        self.quarantined: dict[str, str] = {}
        """Sample id -> reason why its teacher's scores cannot be used; such a sample is not trained. Complete once `arrived`."""
        self.restarted = restarted
        """Scoring workers that died and were started again; their rows were scored a second time."""
        self.arrived = False
        """True once all parts came and no row is missing."""
        self.busy_s = 0.0
        """Seconds in which teachers scored: from the request to the last part."""
        self.num_parts = 0
        self.nbytes = 0
        self._began = time.monotonic()
        self._source = source
        self._sent_rollouts = {r.sample_id: r for r in request.rollouts}
        self._missing = {(r.sample_id, name) for r in request.rollouts for name in request.teachers[r.domain]}
        self._rows_to_take = Counter(sample_id for sample_id, _ in self._missing)
        self._collected: deque[StreamPart] = deque()
        self._width: int | None = None
        """Width of all answers, such as the K of a top-k; None before the first that has one."""
        self._records: dict[int, list[PartRecord]] = {}
        self._rows_by_teacher: dict[int, Counter[str]] = {}
        """Worker -> rows that came from it, by teacher."""
        self._sinks: list[Sink] = []
        self._sink_waits: list[Callable[[], object]] = []

    def add_sink(self, sink: Sink) -> None:
        """Call `sink` with every part's record and bytes before it is trained, and with None for both after the last part. If it
        returns a function, `wait_for_sinks` calls that."""
        self._sinks.append(sink)

    def wait_for_sinks(self) -> None:
        """Wait until all sinks are done with the parts. Raises: what they raise."""
        unsettled, self._sink_waits = self._sink_waits, []
        for wait in unsettled:
            wait()

    def wait_for_parts(self) -> None:
        """Wait for all parts; `take_part` returns them afterwards. Raises: as `take_part`."""
        while (part := self._next_part()) is not None:
            self._collected.append(part)

    def take_part(self) -> StreamPart | None:
        """Wait for the next part, and return it; None after the last.

        Raises: StreamError for a part that does not answer the request; RunError if a teacher fails, or if more than
        `max_quarantined` of the responses could not be scored (one always may).
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
        """Return True once every teacher's row of these samples was taken, or the sample is quarantined."""
        return all(not self._rows_to_take[i] or i in self.quarantined for i in sample_ids)

    @property
    def rows(self) -> int:
        """Rows of the samples that are not quarantined: one for each teacher of a sample."""
        return sum(len(self.request.teachers[r.domain]) for i, r in self._sent_rollouts.items() if i not in self.quarantined)

    def _next_part(self) -> StreamPart | None:
        if self.arrived:
            return None
        handle = next(self._source, None)
        if handle is None:
            # Before the sinks hear of the end: with it the target log makes the step whole.
            self._check_complete()
            self.busy_s = time.monotonic() - self._began
            self._show_to_sinks(None, None)
            self.arrived = True
            return None
        raw = cluster.fetch_object(handle)
        try:
            # Without the vocabulary: the ranks, which read the rows, check the ids.
            stream = read_stream(memoryview(raw))
        except StreamError as error:
            raise StreamError(f"{self.request.sender}: {error}") from None
        if (stream.dtype, stream.payload) != self.request.kind:
            raise StreamError(
                f"{self.request.sender}: {stream.payload} in {stream.dtype} came, wanted {' in '.join(self.request.kind[::-1])}"
            )
        for row in stream.rows:
            self._check_row(row)
        self._keep_part(stream.part, stream.rows)
        self._show_to_sinks(stream.part, raw)
        self.num_parts += 1
        self.nbytes += raw.nbytes
        return StreamPart(handle=handle, nbytes=raw.nbytes, samples=tuple(row.rollout.sample_id for row in stream.rows))

    def _show_to_sinks(self, record: PartRecord | None, raw: np.ndarray | None) -> None:
        self._sink_waits += [wait for sink in self._sinks if (wait := sink(record, raw)) is not None]

    def _check_row(self, row: TargetRow) -> None:
        """Check that the row was requested, comes once, and is about the very tokens that were sent. Raises: StreamError."""
        sample_id = row.rollout.sample_id
        label = f"{self.request.sender}: row {sample_id} of teacher {row.teacher}"
        rollout = self._sent_rollouts.get(sample_id)
        if rollout is None or (sample_id, row.teacher) not in self._missing:
            raise StreamError(f"{label}: not asked for, or twice")
        expected = self.request.teachers[rollout.domain][row.teacher]
        # The weight travelled as float32.
        if row.weight != float(np.float32(expected.weight)) or row.answer.head_key() != expected.head:
            raise StreamError(f"{label}: another weight or head")
        if not _equal_as_sent(row.rollout, rollout):
            raise StreamError(f"{label}: not the rollout that was sent")
        width = row.answer.width(rollout.num_trained)
        self._width = width if self._width is None else self._width
        if width not in (None, self._width):
            raise StreamError(f"{label}: an answer of width {width}, others have {self._width}")
        self._missing.remove((sample_id, row.teacher))

    def _keep_part(self, record: PartRecord, rows: Sequence[TargetRow]) -> None:
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
            counted = records[-1].teachers
            if counted is None:
                raise StreamError(
                    f"{self.request.sender}: worker {worker} ends after {len(records)} parts without its end record"
                )
            # `+` drops zeros: a teacher of which no row came is in the worker's counts alone.
            if +Counter(counted) != +self._rows_by_teacher[worker]:
                raise StreamError(
                    f"{self.request.sender}: worker {worker} counts {dict(counted)} rows, {dict(self._rows_by_teacher[worker])} came"
                )
        # Of a quarantined response, a second teacher's row may be there all the same.
        missing = sorted(sample_id for sample_id, _ in self._missing if sample_id not in self.quarantined)
        if missing:
            raise StreamError(f"{self.request.sender}: {len(missing)} rows are missing, first {missing[0]}")


def refuse_many_broken(broken: Mapping[str, str], num_rollouts: int, max_share: float) -> None:
    """Refuse a step with too many broken responses. Raises: RunError for more than `max_share`; one always may be broken."""
    if len(broken) > max(1, max_share * num_rollouts):
        sample_id, reason = next(iter(broken.items()))
        raise RunError(
            f"{len(broken)} of {num_rollouts} responses could not be scored, first {sample_id}: {reason}; "
            f"teachers.max_quarantined is {max_share}"
        )


_OTHER_FIELDS = attrgetter(*(field.name for field in fields(Rollout) if field.name != "behaviour_logprobs"))


def _equal_as_sent(came: Rollout, sent: Rollout) -> bool:
    """Return True if all fields are equal; log-probs are compared as float32, in which they travel."""
    sent_logprobs, came_logprobs = (np.array(rollout.behaviour_logprobs, np.float32) for rollout in (sent, came))
    return _OTHER_FIELDS(came) == _OTHER_FIELDS(sent) and np.array_equal(sent_logprobs, came_logprobs)
