"""One continuous batch: turns of many episodes, sampled by an in-process vLLM engine that is stepped by hand.

    loop's thread      episode ─ generate ─┐  episode ─ generate ─┐      (asyncio: waits for turns and environments)
                                           ▼                      ▼
    calling thread     ── step ── step ── add ── step ── step ── add ── step ──▶   (the only one that touches the engine)

A request that comes while the engine runs joins the batch at the next step, so nobody waits for the slowest episode. But if a step
has ended most turns of the batch, the engine waits a moment for the next turns of these episodes: a step costs nearly the same for one
turn as for all, and meanwhile the two threads would take the interpreter from each other.
"""

from __future__ import annotations

import asyncio
import math
import queue
import threading
import time
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain
from operator import methodcaller
from typing import TYPE_CHECKING, Any, TypeVar

from opd.errors import RunError
from opd.interfaces import TokenEngine
from opd.records.types import SampledTurn

if TYPE_CHECKING:  # that module starts engines, and uses this one
    from opd.rollouts.worker import Generated

T = TypeVar("T")
FIRST_WAIT_S, NEXT_WAIT_S, MAX_WAIT_S = 0.02, 0.005, 0.2
"""Longest waits of the engine for turns that may be about to come, in seconds: for the first, after each for the next, and for all."""
END_S = 10.0
"""Deadline in seconds for the loop's thread to end after an engine failed; every turn that it waits for has raised by then."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """Settings by which the engines sample. Turns differ only in length and seed."""

    params: Callable[[int, int], Any]
    """Takes the longest length of a turn and its seed, and returns the engine's sampling parameters."""
    read: Callable[[Any], Generated]
    """Takes an output of the engine, and returns the tokens in it after checking them. Raises: RunError."""
    context: int
    """Longest sequence of the engine in tokens."""
    policy_version: int


@dataclass(frozen=True, slots=True, eq=False)
class _TurnRequest:
    """A turn that an episode waits for."""

    token_ids: list[int]
    params: Any
    future: asyncio.Future[SampledTurn]
    loop: asyncio.AbstractEventLoop
    engine: int
    """Index of the engine that samples the turn."""


Settle = Callable[[asyncio.Future[SampledTurn]], None]
"""Sets the result or the error of a turn's future, which ends the wait for it."""


@dataclass(frozen=True, slots=True, eq=False)
class _TurnCancelled:
    """Notice that nobody waits for a turn any more."""

    request: _TurnRequest


class BatchEngine:
    """Implements `opd.interfaces.TokenEngine` while `drive` runs."""

    def __init__(self, engine: Any, sampling: Sampling) -> None:
        """`engine` is a `vllm.v1.engine.llm_engine.LLMEngine`, or an object with its methods. Nobody else may use it meanwhile."""
        self._engines = [engine]
        self._sampling = sampling
        self._inbox: queue.SimpleQueue[_TurnRequest | _TurnCancelled | None] = queue.SimpleQueue()
        """Requests and notices from the loop's thread; None at the end."""
        self._waiting: dict[str, _TurnRequest] = {}
        """Name of a request in the engine -> the request: the batch."""
        self._num_requests = 0
        self._expected_turns = math.inf
        """Number of turns that ended lately, each of which may bring another; infinite at the beginning, when nobody knows."""
        self._failed = ""
        """Reason why an engine failed; empty as long as none has."""

    def add_engine(self, engine: Any) -> TokenEngine:
        """Add another engine, such as an expert's. It is stepped by the same thread, and has the same sampling settings."""
        self._engines.append(engine)
        return _AddedEngine(self, len(self._engines) - 1)

    async def generate(self, token_ids: Sequence[int], *, max_tokens: int, seed: int) -> SampledTurn:
        return await self.sample_turn(token_ids, max_tokens, seed, engine=0)

    async def sample_turn(self, token_ids: Sequence[int], max_tokens: int, seed: int, *, engine: int) -> SampledTurn:
        """Sample a turn by the engine of that index. Raises: RunError if there is no room for a token, or an engine fails."""
        room = min(max_tokens, self._sampling.context - len(token_ids))
        if self._failed or room < 1 or not token_ids:
            raise RunError(
                self._failed or f"no room for a turn: {len(token_ids)} tokens before it, {max_tokens} asked for"
            )
        loop = asyncio.get_running_loop()
        request = _TurnRequest(list(token_ids), self._sampling.params(room, seed), loop.create_future(), loop, engine)
        self._inbox.put(request)
        # If the engine's thread has failed meanwhile, it may have emptied the inbox for the last time already.
        if self._failed:
            raise RunError(self._failed)
        try:
            return await request.future
        except asyncio.CancelledError:
            self._inbox.put(_TurnCancelled(request))
            raise

    def drive(self, work: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Run `work()` in an event loop in another thread, step the engines in this one until it is done, and return its result.

        Raises: the error of `work`, or of an engine. Turns that are unfinished then are taken out of the engines.
        """
        done: Future[T] = Future()

        def run_loop() -> None:
            try:
                done.set_result(asyncio.run(work()))
            except BaseException as error:  # noqa: BLE001 `done.result()` raises it in the calling thread
                done.set_exception(error)
            finally:
                # This wakes the engine's thread, which waits without a limit while its batch is empty.
                self._inbox.put(None)

        thread = threading.Thread(target=run_loop, name="episodes", daemon=True)
        thread.start()
        try:
            while self._admit_requests():
                self._step()
            return done.result()
        except BaseException as error:
            self._fail_requests(error)
            thread.join(END_S)
            raise
        finally:
            for index, engine in enumerate(self._engines):
                # The engines outlive this call, and would compute unfinished turns with their next batch.
                engine.abort_request([name for name, request in self._waiting.items() if request.engine == index])
            self._waiting.clear()

    def _admit_requests(self) -> bool:
        """Put the requests of the inbox into the batch. Wait for one while the batch is empty; wait a moment if more turns are expected
        than the batch has. Return False once the work is done, True if the engines are to be stepped."""
        # A step for the few turns of the batch would cost nearly as much as one with the expected turns, too.
        patient = self._expected_turns > len(self._waiting)
        began = time.monotonic()
        until, latest = began + FIRST_WAIT_S, began + MAX_WAIT_S
        while True:
            wait_s = max(0.0, min(until, latest) - time.monotonic()) if patient and self._expected_turns else 0.0
            try:
                # Without a turn in the batch there is nothing to step, so the wait has no limit.
                item = self._inbox.get(timeout=wait_s if self._waiting else None)
            except queue.Empty:
                # The expected turns did not come in time, and are not waited for a second time.
                self._expected_turns = 0 if patient else self._expected_turns
                return True
            if item is None:
                return False
            if isinstance(item, _TurnCancelled):
                self._remove_request(item.request)
                continue
            now = time.monotonic()
            until, latest = now + NEXT_WAIT_S, latest if self._waiting else now + MAX_WAIT_S
            self._add_request(item)
            self._expected_turns = max(0, self._expected_turns - 1)

    def _add_request(self, request: _TurnRequest) -> None:
        self._num_requests += 1
        name = str(self._num_requests)
        self._waiting[name] = request
        prompt = {"type": "token", "prompt_token_ids": request.token_ids}
        self._engines[request.engine].add_request(name, prompt, request.params)

    def _remove_request(self, request: _TurnRequest) -> None:
        for name in [name for name, waiting in self._waiting.items() if waiting is request]:
            self._engines[request.engine].abort_request([name])
            del self._waiting[name]

    def _step(self) -> None:
        """Step every engine that has a request, and settle the turns that end. One thread steps all engines, because vLLM keeps the state
        of a forward pass for the whole process."""
        at_work = {request.engine for request in self._waiting.values()}
        ended: list[tuple[_TurnRequest, Settle]] = []
        try:
            for output in chain.from_iterable(self._engines[index].step() for index in sorted(at_work)):
                if output.finished and output.request_id in self._waiting:
                    # If this raises, the request is still in `_waiting`, so `_fail_requests` settles it.
                    turn = self._finish_turn(output.outputs[0])
                    ended.append((self._waiting.pop(output.request_id), methodcaller("set_result", turn)))
        finally:
            # Also if a later output raised: these turns are whole, and their episodes wait for them.
            self._expected_turns += len(ended)
            _settle_turns(ended)

    def _finish_turn(self, output: Any) -> SampledTurn:
        """Return the turn of a finished output. Raises: RunError."""
        generated = self._sampling.read(output)
        return SampledTurn(
            token_ids=generated.token_ids,
            logprobs=generated.logprobs,
            stop_reason=generated.stop_reason,
            policy_version=self._sampling.policy_version,
        )

    def _fail_requests(self, error: BaseException) -> None:
        """Fail all turns of the batch and the inbox, so that nobody waits for ever."""
        # This comes first: a `sample_turn` that puts its request into the inbox from now on sees it, and raises.
        self._failed = f"the engine failed: {error}"
        requests = list(self._waiting.values())
        with suppress(queue.Empty):
            while True:
                item = self._inbox.get_nowait()
                requests += [item] if isinstance(item, _TurnRequest) else []
        _settle_turns([(request, lambda future: future.set_exception(RunError(self._failed))) for request in requests])


@dataclass(frozen=True, slots=True)
class _AddedEngine:
    """Implements `opd.interfaces.TokenEngine` for an engine that was added to a batch."""

    batch: BatchEngine
    engine: int

    async def generate(self, token_ids: Sequence[int], *, max_tokens: int, seed: int) -> SampledTurn:
        return await self.batch.sample_turn(token_ids, max_tokens, seed, engine=self.engine)


def _settle_turns(ended: Sequence[tuple[_TurnRequest, Settle]]) -> None:
    """Settle turns in the loop that waits for them: all in one call, because each call wakes the loop's thread."""

    def settle_all() -> None:
        for request, settle in ended:
            if not request.future.done():
                settle(request.future)

    if ended:
        with suppress(RuntimeError):  # the loop has ended, so nobody waits
            ended[0][0].loop.call_soon_threadsafe(settle_all)
