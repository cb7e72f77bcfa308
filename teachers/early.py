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
from opd.cluster import BackgroundCall
from opd.records.types import Prompt, Rollout
from opd.rollouts.groups import Groups
from teachers.weights import weight_key
from teachers.worker import ScoringGroup

if TYPE_CHECKING:
    from opd.stream.targets import TargetStream
    from teachers.pool import Pool


@dataclass(slots=True, eq=False)
class _ScoringJob:
    """One worker's share of one group: the group's rows for each of the worker's teachers."""

    number: int
    """The stream's number of who scores: its parts are counted, and ordered, as a worker's."""
    worker: int
    groups: list[ScoringGroup]
    parts: list[Any] | None = None
    """Handles, once it is scored."""
    nbytes: int = 0

    @property
    def teacher(self) -> str:
        """The teacher that is asked first."""
        return weight_key(self.groups[0][0])


@dataclass(slots=True)
class _BusyClock:
    """Seconds in which at least one worker scored."""

    seconds: float = 0.0
    busy_workers: set[int] = field(default_factory=set)
    since: float = 0.0

    def begin(self, worker: int) -> None:
        self.since = self.since if self.busy_workers else time.monotonic()
        self.busy_workers.add(worker)

    def end(self, worker: int) -> None:
        self.busy_workers.discard(worker)
        self.seconds += 0.0 if self.busy_workers else time.monotonic() - self.since

    def read_seconds(self) -> float:
        """Return the seconds so far."""
        return self.seconds + (time.monotonic() - self.since if self.busy_workers else 0.0)


class EarlyScores:
    """Implements `opd.rollouts.groups.Early` for one step."""

    def __init__(self, pool: Pool, prompts: Sequence[Prompt], sample_ids: Sequence[str], size: int) -> None:
        self._pool = pool
        self._groups = Groups(prompts, sample_ids, size, self._queue_group)
        self.group_of: Mapping[str, int] = self._groups.of
        self._owners = pool.assign_teachers(prompts)
        self._condition = threading.Condition()
        """Guards everything below, which the driver and the threads share."""
        self._jobs: list[_ScoringJob] = []
        self._queues: dict[int, list[_ScoringJob]] = defaultdict(list)
        self._awaited_job: _ScoringJob | None = None
        """The job that the trainer takes next: it is scored however many rows wait for the trainer."""
        self._pending_bytes = 0
        """Bytes that are scored and were not taken."""
        self._clock = _BusyClock()
        self._threads: dict[int, BackgroundCall[None]] = {}
        self._failed_workers: set[int] = set()
        self._last_teacher: dict[int, str] = {}
        """Worker -> the teacher that it asked last."""
        self._restarted_workers: list[str] = []

    def written(self, sample_id: str, rollouts: Sequence[Rollout]) -> None:
        """See `Early.written`. Raises: RunError for a domain without a teacher, or what a scoring worker raised."""
        self._groups.written(sample_id, rollouts)

    def stream(self, rollouts: Sequence[Rollout]) -> TargetStream:
        """See `Early.stream`. The parts come in the order of the groups."""
        return self._pool.build_stream(
            rollouts, self._iterate_parts(), self._restarted_workers, busy_s=self._clock.read_seconds
        )

    def _queue_group(self, number: int, rollouts: Sequence[Rollout]) -> None:
        """Let each worker score what it has of a group that is whole."""
        groups_by_worker: dict[int, list[ScoringGroup]] = defaultdict(list)
        for group in self._pool.group_by_teacher(rollouts):
            groups_by_worker[self._owners[weight_key(group[0])]].append(group)
        with self._condition:
            for worker, groups in sorted(groups_by_worker.items()):
                job = _ScoringJob(number * self._pool.num_workers + worker, worker, groups)
                self._jobs.append(job)
                self._queues[worker].append(job)
                self._start_thread(worker)

    def _start_thread(self, worker: int) -> None:
        """Have a thread score what waits for a worker, unless one does. Raises: what the last one raised."""
        if worker in self._failed_workers:
            self._threads[worker].result(timeout_s=self._pool.timeout_s)
        if worker not in self._clock.busy_workers and self._choose_job(worker) is not None:
            self._clock.begin(worker)
            self._threads[worker] = BackgroundCall(partial(self._score_all, worker), f"teacher worker {worker}, early")

    def _choose_job(self, worker: int) -> _ScoringJob | None:
        """Return the job that the worker scores next; None if it has to wait.

        A job of the teacher whose weights it has loaded goes first, which saves a swap; the job that the trainer waits for
        goes before all, also beyond the byte limit: only its rows let the trainer go on.
        """
        queue, limit = self._queues[worker], self._pool.early_bytes
        if self._awaited_job in queue:
            return self._awaited_job
        if not queue or (limit is not None and self._pending_bytes >= limit):
            return None
        return next((job for job in queue if job.teacher == self._last_teacher.get(worker)), queue[0])

    def _score_all(self, worker: int) -> None:
        """Score until nothing waits, or nothing more may be scored yet."""
        is_done = False
        try:
            while (job := self._take_job(worker)) is not None:
                parts = self._score_job(job)
                nbytes = sum(cluster.fetch_object(part).nbytes for part in parts)
                with self._condition:
                    job.parts, job.nbytes = parts, nbytes
                    self._pending_bytes += nbytes
                    self._condition.notify_all()
            is_done = True
        finally:  # whatever ended it: the trainer may wait for this thread's rows
            if not is_done:
                with self._condition:
                    self._failed_workers.add(worker)
                    self._clock.end(worker)
                    self._condition.notify_all()

    def _take_job(self, worker: int) -> _ScoringJob | None:
        """Take the next job for the worker's thread. None ends the thread, in one move with finding nothing to do: what comes later
        starts another one."""
        with self._condition:
            job = self._choose_job(worker)
            if job is None:
                self._clock.end(worker)
                self._condition.notify_all()
                return None
            self._queues[worker].remove(job)
            self._last_teacher[worker] = weight_key(job.groups[-1][0])
            return job

    def _score_job(self, job: _ScoringJob) -> list[Any]:
        """Return the parts of a job; a worker that dies is restarted and scores the job anew. Raises: what `Pool.restart_worker` and the worker raise."""
        while True:
            answers = self._pool.begin_share(job.worker, job.groups, job.number)
            parts: list[Any] = []
            try:
                while True:
                    cluster.wait_first([answers[0]], timeout_s=self._pool.timeout_s)
                    part = answers.popleft().handle
                    if cluster.fetch_object(part) is None:
                        return parts
                    parts.append(part)
                    answers.append(self._pool.next_part(job.worker))
            except cluster.WorkerDied as error:
                self._pool.restart_worker(error, self._restarted_workers)

    def _iterate_parts(self) -> Iterator[Any]:
        """Yield handles to all parts, those of one job after the other."""
        for job in sorted(self._jobs, key=lambda job: job.number):
            with self._condition:
                self._awaited_job = job
                while job.parts is None:
                    self._start_thread(job.worker)
                    self._condition.wait()
                parts = job.parts
                self._pending_bytes -= job.nbytes
                job.parts = []  # the trainer holds them as long as it needs them
                for worker in self._queues:  # those that had to wait for bytes to be taken
                    self._start_thread(worker)
            yield from parts
