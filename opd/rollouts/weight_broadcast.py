"""Hand new weights to rollout workers as the trainer sends them: bucket by bucket, and from machine to machine.

    ranks            gather 1    gather 2    gather 3
                          └──────────┐└──────────┐
    first machine                 take 1      take 2      take 3
                                      └──────────┐└──────────┐
    second machine                            take 1      take 2 ...

A machine takes a bucket while the machine after it takes the bucket before. So each machine sends a bucket once, over its own link;
otherwise the trainer's machine would send it to all of them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, TypeVar

from opd import cluster
from opd.cluster import LostValue, Pending, Worker, WorkerDied
from opd.models.buckets import WeightStream
from opd.rollouts.worker import VLLMWorker

Engine = Worker[VLLMWorker]
R = TypeVar("R")


def pass_buckets(workers: Sequence[Engine], stream: WeightStream, *, timeout_s: float) -> None:
    """Have workers take all buckets of a stream; the caller still has to call `VLLMWorker.finish_stream`. The next bucket is asked for only
    when every machine has taken its bucket, so that no machine's store holds more than a few.

    A worker that dies misses the rest, and the others go on: vLLM cannot give up a reload in the middle. If a machine dies with
    buckets that others are to get from it, they get them from the machine before it.
    `timeout_s` is the deadline of each worker for each bucket. Raises: what `opd.cluster.wait_for_all` raises, except for the death of one
    of these workers.
    """
    alive = list(workers)
    # A single worker is sent its buckets directly, wherever it is, so its node does not matter.
    nodes = _call_all(alive, lambda worker: worker.node_id(), timeout_s) if len(alive) > 1 else dict.fromkeys(alive, "")
    line = BucketLine(group_by_machine(nodes, stream.node), timeout_s)
    line.begin(stream)
    if not line.alive:
        return
    for handle in stream.buckets:
        line.advance_buckets(handle)
        if not line.alive:
            return
    line.finish_line()


@dataclass(slots=True)
class LineMachine:
    """A machine in the line."""

    node: str
    """Ray's id of the machine."""
    workers: list[Engine]
    """The living engines on it. If there are none, it passes nothing on: the machine may be dead."""
    local_workers: list[Engine] = field(default_factory=list)
    """Engines on the trainer's machine, listed with the first machine. They take the same buckets as that one, but need no link."""

    @property
    def alive(self) -> list[Engine]:
        return [*self.workers, *self.local_workers]

    def forget(self, worker: Engine) -> None:
        """Remove a worker that is dead, if it is on this machine."""
        for workers in (self.workers, self.local_workers):
            if worker in workers:
                workers.remove(worker)


def group_by_machine(nodes: Mapping[Engine, str], source: str | None) -> list[LineMachine]:
    """Return the machines of the line. `nodes` has the node of each worker; `source` is the node from which the buckets come, None if it
    is not known."""
    engines_by_node: dict[str, list[Engine]] = {}
    for worker, node in nodes.items():
        engines_by_node.setdefault(node, []).append(worker)
    # If all engines are on the trainer's machine, that machine alone is the line.
    local_workers = engines_by_node.pop(source, []) if source is not None and len(engines_by_node) > 1 else []
    machines = [LineMachine(node, workers) for node, workers in engines_by_node.items()]
    if local_workers:
        machines[0].local_workers = local_workers
    return machines


class _Bucket:
    """A bucket that some machines have taken and others still wait for."""

    def __init__(self, handle: Any) -> None:
        self.handles: deque[Any] = deque([handle], maxlen=2)
        """Handles to the newest copies. The next machine takes the last; the one before is there in case the last is lost with its
        machine."""


@dataclass(slots=True)
class _BucketTransfer:
    """A bucket on its way into one machine."""

    machine_index: int
    bucket: _Bucket
    copy: Any | None
    """Handle to the machine's own copy, which the next machine takes; None if nobody waits for it."""
    taking: list[tuple[Engine, Pending[None]]]
    """The workers that take the bucket, with their calls."""


class BucketLine:
    """The machines in the order in which a bucket reaches them."""

    def __init__(self, machines: Sequence[LineMachine], timeout_s: float) -> None:
        self._machines = machines
        self._timeout_s = timeout_s
        self._buckets: deque[_Bucket | None] = deque()
        """The bucket that each machine takes now, the first machine's first; None where the line has run out of buckets."""

    @property
    def alive(self) -> list[Engine]:
        return list(chain.from_iterable(machine.alive for machine in self._machines))

    def begin(self, stream: WeightStream) -> None:
        """Have all workers expect the stream."""
        alive = self.alive
        begun = _call_all(
            alive,
            lambda worker: worker.submit(VLLMWorker.begin_stream, stream.model_dir, whole=stream.whole),
            self._timeout_s,
        )
        for worker in alive:
            if worker not in begun:
                self._drop_worker(worker)

    def advance_buckets(self, handle: Any) -> None:
        """Move the line on by one bucket: the first machine takes the new one, and every other machine the bucket that the machine before
        it took last."""
        self._shift_buckets(_Bucket(handle))

    def finish_line(self) -> None:
        """Move the buckets that are under way to the end of the line, once no other comes."""
        for _ in range(len(self._machines) - 1):
            self._shift_buckets(None)

    def _shift_buckets(self, bucket: _Bucket | None) -> None:
        """Give `bucket` to the first machine, and every bucket under way to the next machine; wait until all have taken theirs."""
        # Machine i takes the i-th bucket of the deque: a new one in front moves each of the others on by one machine.
        self._buckets.appendleft(bucket)
        transfers = [
            self._send_bucket(index, bucket_of_machine, self._machines[index].alive)
            for index, bucket_of_machine in enumerate(self._buckets)
            if bucket_of_machine is not None
        ]
        for transfer in transfers:
            self._wait_for_transfer(transfer)
        if len(self._buckets) == len(self._machines):
            self._buckets.pop()  # all machines have taken the oldest bucket

    def _send_bucket(self, index: int, bucket: _Bucket, workers: Sequence[Engine]) -> _BucketTransfer:
        """Have workers of a machine take a bucket, and have the machine keep a copy if a living worker is behind it in the line."""
        machine, behind = self._machines[index], self._machines[index + 1 :]
        handle, copy = bucket.handles[-1], None
        # A machine on which all engines died may be dead itself, so it keeps no copy for others.
        if machine.workers and any(later_machine.alive for later_machine in behind):
            copy = cluster.copy_on(machine.node, handle)
        taking = [(worker, worker.submit(VLLMWorker.take_bucket, handle)) for worker in workers]
        return _BucketTransfer(index, bucket, copy, taking)

    def _wait_for_transfer(self, transfer: _BucketTransfer) -> None:
        """Wait for the workers that take a bucket. Raises: LostValue if the bucket is lost with all machines that had it."""
        missing: list[Engine] = []
        for worker, pending in transfer.taking:
            try:
                pending.wait_for_result(timeout_s=self._timeout_s)
            except LostValue:  # the worker's call did not begin, so it can be called again
                missing.append(worker)
                if len(transfer.bucket.handles) == 1:
                    raise
            except WorkerDied as error:
                if error.worker is not worker:
                    raise
                self._drop_worker(worker)
        if missing:
            # The newest copy is lost with its machine, so the copy before it is taken.
            transfer.bucket.handles.pop()
            self._wait_for_transfer(self._send_bucket(transfer.machine_index, transfer.bucket, missing))
        elif transfer.copy is not None and self._machines[transfer.machine_index].workers:
            transfer.bucket.handles.append(transfer.copy)

    def _drop_worker(self, worker: Engine) -> None:
        for machine in self._machines:
            machine.forget(worker)


def _call_all(workers: Sequence[Engine], ask: Callable[[Engine], Pending[R]], timeout_s: float) -> dict[Engine, R]:
    """Call workers at once, and return the answers of those that do not die."""
    answers: dict[Engine, R] = {}
    for worker, pending in [(worker, ask(worker)) for worker in workers]:
        try:
            answers[worker] = pending.wait_for_result(timeout_s=timeout_s)
        except WorkerDied as error:
            if error.worker is not worker:
                raise
    return answers
