"""Scoring of a step that is still being written: groups of rows go to the pool's workers as they become whole.

    driver, while it waits for engines   ready 4 ─┐ ready 0 ─┐ ready 5 ─┐ ready 1 ...        stream: 0, 1, 2, ... in order
    a thread for each scoring worker              └─ score 4 ─└─ score 0, 5 ─ ...

A group is scored alone, so neither the order nor what else is scored changes a bit of it. Its parts leave together: a worker that
dies loses the group that it was at, and no other.
"""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from opd import cluster
from opd.cluster import Background
from opd.records.types import Prompt, Rollout
from opd.rollouts.groups import Groups
from teachers.weights import weight_key
from teachers.worker import Group

if TYPE_CHECKING:
    from opd.stream.targets import TargetStream
    from teachers.pool import Pool


@dataclass(slots=True, eq=False)
class _Job:
    """What one worker scores of one group: rows of all of its teachers."""

    number: int
    """The stream's number of who scores: its parts are counted, and ordered, as a worker's."""
    worker: int
    groups: list[Group]
    parts: list[Any] | None = None
    """Handles, once it is scored."""
    nbytes: int = 0

    @property
    def teacher(self) -> str:
        """The teacher that is asked first."""
        return weight_key(self.groups[0][0])


@dataclass(slots=True)
class _Clock:
    """Seconds in which at least one worker scored."""

    seconds: float = 0.0
    at_work: set[int] = field(default_factory=set)
    since: float = 0.0

    def begin(self, worker: int) -> None:
        self.since = self.since if self.at_work else time.monotonic()
        self.at_work.add(worker)

    def end(self, worker: int) -> None:
        self.at_work.discard(worker)
        self.seconds += 0.0 if self.at_work else time.monotonic() - self.since

    def now(self) -> float:
        """The seconds so far."""
        return self.seconds + (time.monotonic() - self.since if self.at_work else 0.0)


class EarlyScores:
    """Implements `opd.rollouts.groups.Early` for one step."""

    def __init__(self, pool: Pool, prompts: Sequence[Prompt], sample_ids: Sequence[str], size: int) -> None:
        self._pool = pool
        self._groups = Groups(prompts, sample_ids, size, self._ready)
        self.group_of: Mapping[str, int] = self._groups.of
        self._owners = pool.owners(prompts)
        self._changed = threading.Condition()
        """Guards everything below, which the driver and the threads share."""
        self._jobs: list[_Job] = []
        self._waiting: dict[int, list[_Job]] = defaultdict(list)
        self._wanted: _Job | None = None
        """The job that the trainer takes next: it is scored however many rows wait for the trainer."""
        self._untaken = 0
        """Bytes that are scored and were not taken."""
        self._clock = _Clock()
        self._threads: dict[int, Background[None]] = {}
        self._failed: set[int] = set()
        self._last: dict[int, str] = {}
        """Worker -> the teacher that it asked last."""
        self._restarted: list[str] = []

    def written(self, sample_id: str, rollouts: Sequence[Rollout]) -> None:
        """See `Early.written`. Raises: RunError for a domain without a teacher, or what a scoring worker raised."""
        self._groups.written(sample_id, rollouts)

    def stream(self, rollouts: Sequence[Rollout]) -> TargetStream:
        """See `Early.stream`. The parts come in the order of the groups."""
        return self._pool.stream(rollouts, self._source(), self._restarted, busy_s=self._clock.now)

    def _ready(self, number: int, rollouts: Sequence[Rollout]) -> None:
        """Let each worker score what it has of a group that is whole."""
        mine: dict[int, list[Group]] = defaultdict(list)
        for group in self._pool.route(rollouts):
            mine[self._owners[weight_key(group[0])]].append(group)
        with self._changed:
            for worker, groups in sorted(mine.items()):
                job = _Job(number * self._pool.num_workers + worker, worker, groups)
                self._jobs.append(job)
                self._waiting[worker].append(job)
                self._wake(worker)

    def _wake(self, worker: int) -> None:
        """Have a thread score what waits for a worker, unless one does. Raises: what the last one raised."""
        if worker in self._failed:
            self._threads[worker].result(timeout_s=self._pool.timeout_s)
        if worker not in self._clock.at_work and self._next(worker) is not None:
            self._clock.begin(worker)
            self._threads[worker] = Background(partial(self._score_all, worker), f"teacher worker {worker}, early")

    def _next(self, worker: int) -> _Job | None:
        """What the worker scores next: first of the teacher that it has in place."""
        waiting, limit = self._waiting[worker], self._pool.early_bytes
        if self._wanted in waiting:
            return self._wanted
        if not waiting or (limit is not None and self._untaken >= limit):
            return None
        return next((job for job in waiting if job.teacher == self._last.get(worker)), waiting[0])

    def _score_all(self, worker: int) -> None:
        """Score until nothing waits, or nothing more may be scored yet."""
        scored = False
        try:
            while (job := self._begin_next(worker)) is not None:
                parts = self._scored(job)
                nbytes = sum(cluster.fetch(part).nbytes for part in parts)
                with self._changed:
                    job.parts, job.nbytes = parts, nbytes
                    self._untaken += nbytes
                    self._changed.notify_all()
            scored = True
        finally:
            if not scored:
                with self._changed:
                    self._failed.add(worker)
                    self._clock.end(worker)
                    self._changed.notify_all()

    def _begin_next(self, worker: int) -> _Job | None:
        """The job that the worker's thread does now. None ends the thread, in one move with finding nothing to do: what comes later
        starts another one."""
        with self._changed:
            job = self._next(worker)
            if job is None:
                self._clock.end(worker)
                self._changed.notify_all()
                return None
            self._waiting[worker].remove(job)
            self._last[worker] = weight_key(job.groups[-1][0])
            return job

    def _scored(self, job: _Job) -> list[Any]:
        """The parts of a job, of a worker that is started again if it dies. Raises: what `Pool.again` and the worker raise."""
        while True:
            answers = self._pool.begin(job.worker, job.groups, job.number)
            parts: list[Any] = []
            try:
                while True:
                    cluster.first([answers[0]], timeout_s=self._pool.timeout_s)
                    part = answers.popleft().handle
                    if cluster.fetch(part) is None:
                        return parts
                    parts.append(part)
                    answers.append(self._pool.next_part(job.worker))
            except cluster.WorkerDied as error:
                self._pool.again(error, self._restarted)

    def _source(self) -> Iterator[Any]:
        """Handles to all parts, those of one job after the other."""
        for job in sorted(self._jobs, key=lambda job: job.number):
            with self._changed:
                self._wanted = job
                while job.parts is None:
                    self._wake(job.worker)
                    self._changed.wait()
                parts = job.parts
                self._untaken -= job.nbytes
                job.parts = []  # the trainer holds them as long as it needs them
                for worker in self._waiting:
                    self._wake(worker)
            yield from parts
