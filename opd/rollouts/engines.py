"""The workers that hold rollout engines: start them, give them weights, call them together, and restart one that dies."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import chain
from pathlib import Path
from typing import Any, TypeVar

from opd import cluster
from opd.cluster import Pending, Worker
from opd.draft.shape import DraftWeights
from opd.errors import RunError
from opd.interfaces import DirectSource
from opd.machine import orphans
from opd.models.buckets import WeightStream
from opd.rollouts.weight_broadcast import pass_buckets
from opd.rollouts.worker import VLLMWorker

R = TypeVar("R")
Weights = Callable[[], AbstractContextManager[Path]]
"""Returns a context with a Hugging Face directory of the weights that the engines hold; the directory exists within the context."""


class Engines:
    """All rollout workers of a merge, which hold the same weights."""

    def __init__(
        self, spawn: Callable[[int], Worker[VLLMWorker]], num: int, model_dir: Path, deadlines: tuple[float, float]
    ) -> None:
        """`spawn` starts the worker of an index with the weights of `model_dir`. `deadlines` are in seconds: for the start of a worker, and
        for every other call."""
        self._spawn = spawn
        self._start_timeout_s, self._timeout_s = deadlines
        self._workers = [spawn(index) for index in range(num)]
        self._restarted: list[str] = []
        """Names of the workers that were restarted since the last rollouts."""
        self._restore_draft: Callable[[Worker[VLLMWorker]], None] = lambda worker: None
        """Gives a worker that was restarted the draft that the others hold."""
        self._hold_files(lambda: nullcontext(model_dir))

    def wait_ready(self) -> None:
        """Block until every engine is up. Raises: RunError past the deadline."""
        probe = [[0, 0]]  # two tokens of one sequence: the smallest request there is
        answers = [worker.submit(VLLMWorker.logprobs, probe) for worker in self._workers]
        cluster.wait_for_all(answers, timeout_s=self._start_timeout_s)

    def load(self, model_dir: Path, restart_weights: Weights | None = None, base: Path | None = None) -> None:
        base = base and base.absolute()
        # This comes before the call, so that a worker that dies in it is restarted with the new weights.
        self._hold_files(lambda: nullcontext(model_dir), base)
        self._call(lambda worker, _: worker.submit(VLLMWorker.load, model_dir.absolute(), base))
        # From now on `model_dir` may go away, so a restart makes its own directory by `restart_weights`.
        if restart_weights:
            self._hold_files(restart_weights, base)

    def _hold_files(self, weights: Weights, base: Path | None = None) -> None:
        """Have workers that are restarted from now on load these weights. Weights that the directory lacks come from `base`."""

        def restore(worker: Worker[VLLMWorker]) -> None:
            with weights() as model_dir:
                loaded = worker.submit(VLLMWorker.load, model_dir.absolute(), base)
                loaded.wait_for_result(timeout_s=self._start_timeout_s)

        self._restore = restore

    def load_draft(self, weights: DraftWeights) -> None:
        handle = cluster.put_object(weights)

        def restore(worker: Worker[VLLMWorker]) -> None:
            worker.submit(VLLMWorker.load_draft, handle).wait_for_result(timeout_s=self._timeout_s)

        self._restore_draft = restore
        self._call(lambda worker, _: worker.submit(VLLMWorker.load_draft, handle))

    def receive(self, send: Callable[[], WeightStream]) -> None:
        self._hold_stream(send)
        pass_buckets(self._workers, send(), timeout_s=self._timeout_s)
        # This call notices the workers that died meanwhile: they are restarted, and get a stream of their own.
        self._call(lambda worker, _: worker.submit(VLLMWorker.finish_stream))

    def _hold_stream(self, send: Callable[[], WeightStream]) -> None:
        """Have workers that are restarted from now on take the stream that `send` returns."""

        def restore(worker: Worker[VLLMWorker]) -> None:
            pass_buckets([worker], send(), timeout_s=self._start_timeout_s)
            worker.submit(VLLMWorker.finish_stream).wait_for_result(timeout_s=self._timeout_s)

        self._restore = restore

    def receive_directly(self, source: DirectSource) -> str:
        self._hold_stream(source.stream)
        problem = self._take_directly(source)
        if problem:
            # Rare, so it may be slow: everybody gets everything through the object store, a restarted worker too.
            self.receive(source.stream)
        else:
            self._call(lambda worker, _: worker.submit(VLLMWorker.finish_stream))
        return problem

    def _take_directly(self, source: DirectSource) -> str:
        """Have all engines take a push out of the channel, which is opened if it is not open to these very engines. Returns the reason why
        not every engine has all weights; empty if every one has. Raises: RunError if no channel can be opened although all engines live;
        what `opd.cluster.wait_first` raises, except for the death of an engine."""
        if not source.is_joined(self._workers):
            memory_ids = self._call(lambda worker, _: worker.submit(VLLMWorker.memory_ids))
            meeting, routes = source.open_channel(self._workers, memory_ids)
            joining = [
                worker.submit(VLLMWorker.join_channel, meeting, engine_routes)
                for worker, engine_routes in zip(self._workers, routes, strict=True)
            ]
            problem, died = self._wait_for_transfer([*joining, *source.join()], source)
            if problem and not died:
                raise RunError(
                    f"trainer and rollout engines find no direct way to each other: {problem}; set sync.kind to network"
                )
            if problem:
                return problem
        model_dir, push = source.plan()
        taking = [worker.submit(VLLMWorker.receive_directly, model_dir, push) for worker in self._workers]
        return self._wait_for_transfer([*taking, *source.send()], source)[0]

    def _wait_for_transfer(self, calls: Sequence[Pending[str]], source: DirectSource) -> tuple[str, bool]:
        """Wait for all calls of engines and ranks, which wait for each other. As soon as one fails, or an engine dies, the others are told
        to give up. Returns the reason, empty if there is no failure, and True if an engine died. Raises: what
        `opd.cluster.wait_first` raises, except for the death of an engine."""
        open_calls, first_problem, death = list(calls), "", ""
        while open_calls:
            try:
                index = cluster.wait_first(open_calls, timeout_s=self._timeout_s)
                problem = open_calls.pop(index).wait_for_result(timeout_s=self._timeout_s)
            except cluster.WorkerDied as error:
                if error.worker not in self._workers:
                    raise
                problem = death = str(error)
                open_calls = [call for call in open_calls if call.worker is not error.worker]
            if problem and not first_problem:
                first_problem = problem
                source.give_up()
        # If an engine died, others may have failed first, because their connections broke; its death is what a user has to know.
        return death or first_problem, bool(death)

    def logprobs(self, token_ids: Sequence[Sequence[int]]) -> list[list[list[float]]]:
        return self._call(lambda worker, _: worker.submit(VLLMWorker.logprobs, token_ids))

    def _dispatch_requests(
        self, method: Callable[..., list[R]], requests: Sequence[Any], group_size: int, *arguments: Any
    ) -> list[R]:
        """Deal requests out among the workers, and return the answers in the order of the requests. They are dealt round-robin, so that
        workers get equal mixes of domains, `group_size` neighbours at a time. `method` of each worker takes its requests, and then the
        `arguments`."""
        num = len(self._workers)
        shares = [[i for i in range(len(requests)) if i // group_size % num == index] for index in range(num)]
        parts = self._call(
            lambda worker, index: worker.submit(method, [requests[i] for i in shares[index]], *arguments)
        )
        answers = dict(zip(chain(*shares), chain(*parts), strict=True))
        return [answers[i] for i in range(len(requests))]

    def _call(self, ask: Callable[[Worker[VLLMWorker], int], Pending[R]]) -> list[R]:
        """Call all workers and return their answers. `ask` takes a worker and its index, and submits the call.

        A worker that dies is restarted, at most once in each call of this method. The programs of its agents are ended, the new worker
        gets the weights that the others hold, and does its part anew. Seeds belong to requests, so its answers are the same. Raises: what
        `opd.cluster.wait_for_all` raises.
        """
        pending = [ask(worker, index) for index, worker in enumerate(self._workers)]
        restarted: set[int] = set()
        while True:
            try:
                return cluster.wait_for_all(pending, timeout_s=self._timeout_s)
            except cluster.WorkerDied as error:
                index = self._restart_worker(restarted, error)
                pending[index] = ask(self._workers[index], index)

    def _restart_worker(self, restarted: set[int], error: cluster.WorkerDied) -> int:
        """Restart the worker that died, give it the weights that the others hold, and return its index. `restarted` has the indices of
        the workers that were restarted in the same call; this one is added. Raises: `error` if the worker is none of these, or died a
        second time."""
        if error.worker not in self._workers or self._workers.index(error.worker) in restarted:
            raise error
        index = self._workers.index(error.worker)
        restarted.add(index)
        self._restarted.append(worker_name(index))
        # The agents' programs that the worker started do not end with it.
        orphans.end_abandoned_processes()
        self._workers[index] = self._spawn(index)
        self._restore(self._workers[index])
        self._restore_draft(self._workers[index])
        return index


def worker_name(index: int) -> str:
    """Return the name of a worker, for errors and for the reservation of its place in the cluster."""
    return f"rollout worker {index}"
