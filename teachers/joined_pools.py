"""The pool of a merge whose teachers have several engines: a pool for each engine, and one stream of all their rows."""

from __future__ import annotations

import queue
import threading
from collections import ChainMap, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol, cast

from opd.cluster import BackgroundCall
from opd.errors import RunError
from opd.interfaces import TeacherPool
from opd.models.heads import HeadSource
from opd.records.types import LayoutProof, Rollout
from opd.stream.part_files import PartsDirectory
from opd.stream.targets import ExpectedRow, StreamPart, TargetStream, TeacherRequest
from teachers.pool import refuse_unknown_domains

GRACE_S = 60.0
"""Seconds beyond the deadline of a pool, which raises an error that says more than ours."""
PUT_S = 1.0
"""Seconds after which a thread with a part that nobody takes looks whether the step was given up."""


class StartedPool(TeacherPool, Protocol):
    """A pool whose workers are started and may not be ready yet."""

    def wait_ready(self) -> None:
        """Wait until every teacher can score. Raises: RunError if one cannot."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class JoinedPool:
    """The pool of one engine."""

    pool: StartedPool
    domains: frozenset[str]
    """Domains of which a teacher is in this pool."""
    has_own_numbers: bool
    """True if the numbers of the pool's workers are no other pool's (`PoolSpec.first_worker`); else they begin at 0, and parts get
    other numbers here."""


PartsQueue = queue.Queue[tuple[int, StreamPart | None]]
"""Index of a stream, and the next of its parts; None after the last one, or after an error."""


class JoinedPools:
    """Implements `opd.interfaces.TeacherPool`. Every pool scores the rollouts of its domains, all of them at the same time."""

    def __init__(
        self, pools: Sequence[JoinedPool], *, numbered_workers: int, max_quarantined: float, timeout_s: float
    ) -> None:
        """Keep the pools. `numbered_workers`: workers of all pools with numbers of their own. `max_quarantined`: share of a step's
        responses that may be left out. `timeout_s`: deadline of the pools for a part."""
        self._pools = pools
        self._numbered_workers = numbered_workers
        self._max_quarantined = max_quarantined
        self._timeout_s = timeout_s
        self.layouts: dict[str, LayoutProof] = {}
        """Teacher's name -> how its rows share a forward pass; filled in `wait_ready`."""
        self._numbers: dict[tuple[int, int], int] = {}
        """Index of a pool without numbers of its own, and number of a worker there -> number of the worker in the step."""

    def wait_ready(self) -> None:
        """Wait until every pool is ready. Raises: RunError if one is not."""
        for joined in self._pools:
            joined.pool.wait_ready()
            self.layouts |= joined.pool.layouts

    def score(self, rollouts: Sequence[Rollout], directory: PartsDirectory | None = None) -> TargetStream:
        """Have every rollout scored by the teachers of its domain. Taking parts raises: what the streams of the pools raise.

        Raises: RunError for a domain without a teacher.
        """
        refuse_unknown_domains(rollouts, {domain: () for joined in self._pools for domain in joined.domains})
        streams: dict[int, TargetStream] = {}
        for index, joined in enumerate(self._pools):
            if own := [rollout for rollout in rollouts if rollout.domain in joined.domains]:
                streams[index] = joined.pool.score(own, directory)
        restarted: list[str] = []
        return TargetStream(
            self._take_parts(streams, restarted),
            join_requests(rollouts, [stream.request for stream in streams.values()], self._max_quarantined),
            heads=ChainMap(*(cast(dict[str, HeadSource], stream.heads) for stream in streams.values())),
            restarted=restarted,
        )

    def heads(self) -> Mapping[str, HeadSource]:
        """Return content hash -> head, of all pools."""
        return {key: head for joined in self._pools for key, head in joined.pool.heads().items()}

    def _take_parts(self, streams: Mapping[int, TargetStream], restarted: list[str]) -> Iterator[StreamPart]:
        """Yield the parts of all streams as they come. `restarted` gets the names of workers that were started again.

        A thread takes the parts of each stream, so that no pool waits for another one.
        """
        parts: PartsQueue = queue.Queue(maxsize=max(1, len(streams)))
        given_up = threading.Event()
        calls = {
            index: BackgroundCall(partial(_queue_parts, index, stream, parts, given_up), "scoring")
            for index, stream in streams.items()
        }
        try:
            while calls:
                try:
                    index, part = parts.get(timeout=self._timeout_s + GRACE_S)
                except queue.Empty:
                    raise RunError(
                        f"teachers: no part came in {self._timeout_s:.0f} s (cluster.phase_timeout_s)"
                    ) from None
                restarted[:] = [name for stream in streams.values() for name in stream.restarted]
                if part is None:
                    calls.pop(index).result(timeout_s=GRACE_S)
                else:
                    yield self._number_part(index, part)
        finally:
            given_up.set()

    def _number_part(self, index: int, part: StreamPart) -> StreamPart:
        """Return the part with a worker's number that is unique in the step: files of the target log have it in their names."""
        if self._pools[index].has_own_numbers:
            return part
        record = part.summary.record
        number = self._numbers.setdefault((index, record.worker), self._numbered_workers + len(self._numbers))
        return replace(part, summary=replace(part.summary, record=replace(record, worker=number)))


def _queue_parts(index: int, stream: TargetStream, parts: PartsQueue, given_up: threading.Event) -> None:
    """Put each part of a stream into the queue as it comes, and None in the end. Raises: what the stream raises."""

    def put_part(part: StreamPart | None) -> None:
        while not given_up.is_set():
            try:
                return parts.put((index, part), timeout=PUT_S)
            except queue.Full:
                continue

    try:
        while (part := stream.take_part()) is not None and not given_up.is_set():
            put_part(part)
    finally:
        put_part(None)


def join_requests(
    rollouts: Sequence[Rollout], requests: Sequence[TeacherRequest], max_quarantined: float
) -> TeacherRequest:
    """Return the request of a step that several pools were asked parts of."""
    first = requests[0]
    teachers: dict[str, dict[str, ExpectedRow]] = defaultdict(dict)
    kinds: dict[str, tuple[str, str]] = {}
    for request in requests:
        for domain, expected in request.teachers.items():
            teachers[domain] |= expected
            if request is not first and domain not in first.teachers:
                kinds[domain] = request.kind
    return TeacherRequest(
        rollouts=rollouts,
        teachers=dict(sorted(teachers.items())),
        kind=first.kind,
        kinds=kinds,
        max_quarantined=max_quarantined,
    )
