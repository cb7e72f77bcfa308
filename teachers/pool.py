"""The pool: has every rollout scored by the teachers of its domain, in scoring workers that share the teachers out."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from opd import cluster
from opd.cluster import Pending, Worker
from opd.errors import RunError
from opd.models.heads import HeadSource
from opd.models.packing import SHARED
from opd.payloads import answer_class
from opd.records.types import LayoutProof, Rollout, Teacher, WeightedTeacher
from opd.rollouts.processes import engine_env
from opd.stream.part_files import PartsDirectory
from opd.stream.part_summaries import parse_summary
from opd.stream.targets import ExpectedRow, StreamPart, TargetStream, TeacherRequest
from opd.vocabularies.response_encoder import UnreadableResponseError
from teachers.scorers import ScorerOptions, batch_tokens
from teachers.scorers.rows import split_batches
from teachers.shares import TeacherRows, assign_rows
from teachers.weight_keys import weight_key
from teachers.worker import TeacherWorker

Routes = Mapping[str, Sequence[WeightedTeacher]]
"""Domain -> the teachers that score it."""
Heads = dict[str, HeadSource]
"""Content hash -> head."""
PendingParts = deque[tuple[Pending[bytes | None], Any]]
"""Parts that a worker was asked for and that were not taken yet, oldest first: the summary, which is None after the last part, and a handle
to the part itself."""
PARTS_AHEAD = 2
"""Parts that a worker is asked for before the first of them is taken, so that it never waits for the driver. Together
with `teachers.queue` this limits how many bytes have been scored but not yet trained; one part more is being encoded."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolSpec:
    """Settings of a pool."""

    engine: str
    """The kind of scorer: a name in `teachers.scorers.SCORERS`."""
    scorer: ScorerOptions
    """Options from which every worker makes its scorer."""
    workers: int = 1
    """Number of scoring workers, which share the rows of a step."""
    first_worker: int = 0
    """Number of the first worker: those of several pools of a merge are numbered one after the other."""
    other_processes: int = 0
    """Processes of other pools that compute on the same cores at the same time."""
    gpus: float = 0
    """GPUs of each worker; with engine `vllm`, GPUs of each process of the worker's engine. 0: the CPU."""
    roles: int = 1
    """Number of roles, this one included, that compute at the same time on these cores."""
    kv_cache_gib: int = 1
    """Key-value cache of each process of engine `vllm` on the CPU, whole GiB."""
    max_quarantined: float
    """Share of a step's responses that may be left out before the run stops."""
    start_timeout_s: float
    """Deadline for a teacher to be loaded and to answer for the first time."""
    timeout_s: float
    """Deadline of every other call."""


class Pool:
    """Implements `opd.interfaces.TeacherPool`."""

    def __init__(self, spec: PoolSpec, routes: Routes) -> None:
        self._routes = {domain: tuple(assigned) for domain, assigned in routes.items()}
        self._start_timeout_s = spec.start_timeout_s
        self._max_quarantined = spec.max_quarantined
        processes_per_worker = spec.scorer.tensor_parallel_size
        self._gpus = spec.gpus * processes_per_worker
        self._env = cluster.worker_env(spec.workers * processes_per_worker + spec.other_processes, spec.roles)
        if not spec.gpus:
            self._env |= cluster.KEEPS_SOME_MEMORY | {"CUDA_VISIBLE_DEVICES": ""}
        if spec.engine == "vllm":
            self._env |= engine_env(processes_per_worker) | {"VLLM_CPU_KVCACHE_SPACE": str(spec.kv_cache_gib)}
        self._engine = spec.engine
        self._first_worker = spec.first_worker
        encoders = {a.teacher.name: a.encoder for part in routes.values() for a in part if a.encoder is not None}
        self._options = replace(spec.scorer, spellings={name: own.spelling for name, own in encoders.items()})
        self._workers = [self._spawn_worker(index) for index in range(spec.workers)]
        self._stopped = False
        self._teacher_heads: dict[str, tuple[Teacher, HeadSource]] = {}
        """`weight_key` -> one of the teachers with these weights, and their output head as a source without a handle."""
        self.layouts: dict[str, LayoutProof] = {}
        """Teacher's name -> how its rows share a forward pass; proven in `wait_ready`."""
        self._share_prompts: set[str] = set()
        """`weight_key` of each teacher that computes the tokens with which several rows begin only once."""
        self._sends_heads = answer_class(spec.scorer.payload).SENDS_HEADS
        self._heads: Heads = {}
        """The heads that rows of the newest stream refer to."""
        self._num_workers = spec.workers
        self._timeout_s = spec.timeout_s

    def wait_ready(self) -> None:
        """Wait until every teacher has been loaded and has answered once. Raises: RunError if one does not load or answer."""
        worker, servers = self._workers[0], self._options.servers
        teachers = [assigned.teacher for part in self._routes.values() for assigned in part]
        # Teachers with equal weights are tried once. Those with different servers are tried separately, because we cannot
        # tell which weights a server holds.
        for teacher in {(weight_key(t), servers.get(t.name)): t for t in teachers}.values():
            head = worker.submit(TeacherWorker.describe_head, teacher).wait_for_result(timeout_s=self._start_timeout_s)
            self._teacher_heads[weight_key(teacher)] = (teacher, head)
            proof = worker.submit(TeacherWorker.prove_layout, teacher).wait_for_result(timeout_s=self._start_timeout_s)
            if proof is not None:
                self.layouts[teacher.name] = proof
                if proof.layout == SHARED:
                    self._share_prompts.add(weight_key(teacher))

    def score(self, rollouts: Sequence[Rollout], directory: PartsDirectory | None = None) -> TargetStream:
        """Have every rollout scored by the teachers of its domain; the workers begin at once.

        Those that reach `directory` write their parts there.

        Taking parts from the stream raises: RunError if a worker dies twice or misses the deadline.

        Raises: RunError for a domain without a teacher.
        """
        groups, broken = self._group_by_teacher(rollouts)
        shares = assign_rows(groups, self._num_workers, self._cut_batches)
        restarted: list[str] = []
        # The first worker reports the responses that none can score.
        reported = [broken, *({} for _ in shares[1:])]
        pending = [self._begin_share(i, share, directory, reported[i]) for i, share in enumerate(shares)]
        source = self._iterate_parts(shares, pending, directory, reported, restarted)
        return self._build_stream(rollouts, source, restarted)

    def _build_stream(
        self,
        rollouts: Sequence[Rollout],
        source: Iterator[StreamPart],
        restarted: list[str],
    ) -> TargetStream:
        """Build the stream of a step, which checks its rows; `source` yields its parts.

        `restarted` collects the names of workers that were restarted.
        """
        domains = sorted({r.domain for r in rollouts})
        teachers = [assigned.teacher for domain in domains for assigned in self._routes[domain]]
        keys = {teacher.name: self.head_of(teacher).key for teacher in teachers} if self._sends_heads else {}
        heads = self.heads()
        self._heads = {key: heads[key] for key in sorted(set(keys.values()))}
        request = TeacherRequest(
            rollouts=rollouts,
            teachers=expected_rows(domains, self._routes, keys),
            kind=(self._options.dtype, self._options.payload),
            max_quarantined=self._max_quarantined,
        )
        return TargetStream(source, request, heads=self._heads, restarted=restarted)

    def heads(self) -> Heads:
        """Return content hash -> head. Only once the pool is ready.

        A head's matrix is read when it is fetched, from the weights of the first teacher that has this head.
        """
        heads_by_key: Heads = {}
        for teacher, head in self._teacher_heads.values():
            worker, timeout_s = self._workers[0], self._timeout_s
            handle = worker.on_demand(timeout_s, TeacherWorker.read_head, teacher)
            has_tables = teacher.name in self._options.spellings
            tables = worker.on_demand(timeout_s, TeacherWorker.read_tables, teacher.name) if has_tables else None
            heads_by_key.setdefault(head.key, replace(head, handle=handle, tables=tables))
        return heads_by_key

    def read_head(self, key: str) -> np.ndarray:
        """Return the matrix [V, D] of a head, as it travels. Raises: WorkerDied if the worker that reads it is dead."""
        handle = self.heads()[key].handle
        assert handle is not None
        return handle.fetch()

    def read_head_with_restart(self, key: str) -> np.ndarray:
        """Return the matrix of a head; if the worker that reads it is dead, restart it first.

        No step may be under way. Raises: WorkerDied if the new worker dies too.
        """
        try:
            return self.read_head(key)
        except cluster.WorkerDied as error:
            self.restart_worker(cluster.WorkerDied(str(error), self._workers[0]), [])
            return self.read_head(key)

    def head_of(self, teacher: Teacher) -> HeadSource:
        """Return a teacher's head without a handle, once the pool is ready."""
        return self._teacher_heads[weight_key(teacher)][1]

    def stop(self) -> None:
        """End the workers; a `score` in another thread raises RunError."""
        self._stopped = True
        for worker in self._workers:
            worker.kill()

    def _iterate_parts(
        self,
        shares: Sequence[Sequence[TeacherRows]],
        pending: list[PendingParts],
        directory: PartsDirectory | None,
        broken: Sequence[Mapping[str, str]],
        restarted: list[str],
    ) -> Iterator[StreamPart]:
        """Yield the parts of all workers as they arrive. `pending`: for each worker, the parts under way; `broken`: what it reports.

        A worker that dies is restarted once and scores its whole share again. As many of its parts as had arrived before
        its death are then skipped.
        """
        num_parts, num_skipped = [0] * len(shares), [0] * len(shares)
        while any(pending):
            # If several workers have a part ready, take that of the worker with the fewest parts so far. Otherwise one
            # share would fall behind whenever the trainer is slower than the workers.
            busy = sorted(
                (index for index, answers in enumerate(pending) if answers), key=lambda index: num_parts[index]
            )
            try:
                index = busy[cluster.wait_first([pending[i][0][0] for i in busy], timeout_s=self._timeout_s)]
                text = pending[index][0][0].wait_for_result(timeout_s=self._timeout_s)
            except cluster.WorkerDied as error:
                index = self.restart_worker(error, restarted)
                pending[index] = self._begin_share(index, shares[index], directory, broken[index], num_parts[index])
                num_parts[index], num_skipped[index] = 0, num_parts[index]
                continue
            _, handle = pending[index].popleft()
            if text is None:
                pending[index].clear()
                continue
            pending[index].append(self._next_part(index))
            num_parts[index] += 1
            if num_parts[index] > num_skipped[index]:
                yield StreamPart(handle=handle, summary=parse_summary(text), driver_bytes=len(text))

    def _begin_share(
        self,
        index: int,
        share: Sequence[TeacherRows],
        directory: PartsDirectory | None,
        broken: Mapping[str, str],
        written: int = 0,
    ) -> PendingParts:
        """Let worker `index` score these groups, and ask it for its first parts. `written`: parts that came in the step already."""
        number = self._first_worker + index
        # Not waited for: a worker does its calls in order, so the parts come after this.
        self._workers[index].submit(TeacherWorker.begin_rows, share, number, directory, written, broken)
        return deque(self._next_part(index) for _ in range(PARTS_AHEAD))

    def _next_part(self, index: int) -> tuple[Pending[bytes | None], Any]:
        """Ask a worker for its next part; returns at once."""
        return self._workers[index].submit_pair(TeacherWorker.next_part)

    def restart_worker(self, error: cluster.WorkerDied, restarted: list[str]) -> int:
        """Restart the worker that died, add its name to `restarted` (the names of the step so far), and return its index.

        Raises `error` again if that worker is not of this pool or died in this step before, or if the pool was stopped.
        """
        if self._stopped or error.worker not in self._workers:  # a rank's, or Ray itself
            raise error
        index = self._workers.index(error.worker)
        name = worker_name(self._first_worker + index)
        if name in restarted:
            raise error
        restarted.append(name)
        self._workers[index] = self._spawn_worker(index)
        # `stop`, in another thread, may have gone through the list before the new worker was in it.
        if self._stopped:
            self._workers[index].kill()
            raise error
        # Handles made before may point to the dead worker.
        self._heads.update({k: head for k, head in self.heads().items() if k in self._heads})
        return index

    def _spawn_worker(self, index: int) -> Worker[TeacherWorker]:
        return cluster.spawn_worker(
            TeacherWorker,
            self._engine,
            self._options,
            name=worker_name(self._first_worker + index),
            env=self._env,
            gpus=self._gpus,
        )

    def _cut_batches(self, group: TeacherRows) -> list[list[Rollout]]:
        """Cut a group's rows into batches as the scorer of a worker does."""
        teacher, _, rows = group
        return list(split_batches(rows, batch_tokens(self._engine), share=weight_key(teacher) in self._share_prompts))

    def _group_by_teacher(self, rollouts: Sequence[Rollout]) -> tuple[list[TeacherRows], dict[str, str]]:
        """Return a group of rows for each pair of a domain and one of its teachers, and sample id -> why the teacher cannot read it.

        Raises: RunError for a domain without a teacher.
        """
        refuse_unknown_domains(rollouts, self._routes)
        by_domain: dict[str, list[Rollout]] = defaultdict(list)
        for rollout in rollouts:
            by_domain[rollout.domain].append(rollout)
        groups: list[TeacherRows] = []
        broken: dict[str, str] = {}
        for domain, rows in sorted(by_domain.items()):
            for assigned in self._routes[domain]:
                groups.append((assigned.teacher, assigned.weight, tuple(_convert_rows(assigned, rows, broken))))
        return groups, broken


def _convert_rows(assigned: WeightedTeacher, rows: Sequence[Rollout], broken: dict[str, str]) -> Iterator[Rollout]:
    """Yield the rows as a teacher reads them, without those that it cannot read: these get an entry in `broken`, id -> reason."""
    for rollout in rows:
        if assigned.prompts is None:
            yield rollout
        elif assigned.encoder is None:
            yield rollout.as_read_by(assigned.prompts(rollout))
        else:
            try:
                yield assigned.encoder.encode_rollout(rollout, assigned.prompts(rollout))
            except UnreadableResponseError as error:
                broken[rollout.sample_id] = f"teacher {assigned.teacher.name}: {error}"


def worker_name(number: int) -> str:
    """Return the name of a worker in errors, and in the seats that are reserved for workers."""
    return f"teacher worker {number}"


def refuse_unknown_domains(rollouts: Sequence[Rollout], routes: Routes) -> None:
    """Refuse rollouts of a domain without a teacher. Raises: RunError."""
    unknown = sorted({r.domain for r in rollouts} - set(routes))
    if unknown:
        raise RunError(f"no teacher for domain {unknown[0]!r}; teachers serve {', '.join(sorted(routes))}")


def expected_rows(
    domains: Collection[str], routes: Routes, heads: Mapping[str, str]
) -> dict[str, dict[str, ExpectedRow]]:
    """Return domain -> teacher's name -> weight and head that this teacher's rows of the domain must carry.

    `heads`: teacher's name -> content hash of its head; empty if the payload sends no heads.
    """
    return {
        domain: {
            a.teacher.name: ExpectedRow(weight=a.weight, head=heads.get(a.teacher.name, "")) for a in routes[domain]
        }
        for domain in sorted(domains)
    }
