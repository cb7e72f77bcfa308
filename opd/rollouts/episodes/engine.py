"""One continuous batch: turns of many episodes, sampled by an in-process vLLM engine that is stepped by hand.

    loop's thread      episode ─ generate ─┐  episode ─ generate ─┐      (asyncio: waits for turns and environments)
                                           ▼                      ▼
    calling thread     ── step ── step ── add ── step ── step ── add ── step ──▶   (the only one that touches the engine)

A request that comes while the engine runs joins the batch at the next step; nobody waits for the slowest episode. But where a step
has ended most turns of the batch, their next ones are waited for a moment: a step costs nearly the same for one turn as for all,
and the two threads would take the interpreter from each other.
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
"""How long the engine waits for the first of the turns that may be about to come, after each one for the next, and for all."""
END_S = 10.0
"""Deadline for the loop's thread to end after an engine failed: every turn that it waits for raises by then."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """Settings by which one engine samples; the same for all turns but for their length and seed."""

    params: Callable[[int, int], Any]
    """The engine's parameters for a longest length and a seed."""
    read: Callable[[Any], Generated]
    """What the engine wrote, checked. Raises: RunError."""
    context: int
    """Tokens that the engine can hold of one sequence."""
    policy_version: int


@dataclass(frozen=True, slots=True, eq=False)
class _TurnRequest:
    """One turn that somebody waits for."""

    token_ids: list[int]
    params: Any
    future: asyncio.Future[SampledTurn]
    loop: asyncio.AbstractEventLoop
    engine: int
    """Place of the engine that takes the turn."""


Settle = Callable[[asyncio.Future[SampledTurn]], None]
"""Ends somebody's wait for a turn."""


@dataclass(frozen=True, slots=True, eq=False)
class _TurnCancelled:
    """Nobody waits for this turn any more."""

    ask: _TurnRequest


class BatchEngine:
    """Implements `opd.interfaces.TokenEngine` while `drive` runs."""

    def __init__(self, engine: Any, sampling: Sampling) -> None:
        """`engine` is a `vllm.v1.engine.llm_engine.LLMEngine`, or what has its methods, that nobody else uses meanwhile."""
        self._engines = [engine]
        self._sampling = sampling
        self._inbox: queue.SimpleQueue[_TurnRequest | _TurnCancelled | None] = queue.SimpleQueue()
        self._waiting: dict[str, _TurnRequest] = {}
        self._num_requests = 0
        self._expected_turns = math.inf
        """Turns that ended lately, each of which may bring another; at the beginning nobody knows how many."""
        self._failed = ""

    def add_engine(self, engine: Any) -> TokenEngine:
        """Add another engine, such as an expert's, which is stepped by the same thread and samples alike."""
        self._engines.append(engine)
        return _AddedEngine(self, len(self._engines) - 1)

    async def generate(self, token_ids: Sequence[int], *, max_tokens: int, seed: int) -> SampledTurn:
        return await self.sample_turn(token_ids, max_tokens, seed, engine=0)

    async def sample_turn(self, token_ids: Sequence[int], max_tokens: int, seed: int, *, engine: int) -> SampledTurn:
        """Sample a turn by one of the engines: see `generate`."""
        room = min(max_tokens, self._sampling.context - len(token_ids))
        if self._failed or room < 1 or not token_ids:
            raise RunError(
                self._failed or f"no room for a turn: {len(token_ids)} tokens before it, {max_tokens} asked for"
            )
        loop = asyncio.get_running_loop()
        ask = _TurnRequest(list(token_ids), self._sampling.params(room, seed), loop.create_future(), loop, engine)
        self._inbox.put(ask)
        if self._failed:  # after the inbox was emptied for the last time, perhaps
            raise RunError(self._failed)
        try:
            return await ask.future
        except asyncio.CancelledError:
            self._inbox.put(_TurnCancelled(ask))
            raise

    def drive(self, work: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Run `work()` in an event loop in another thread, and step the engine in this one until it is done.

        Raises: what `work` raises, or the engine; a turn that is left then leaves the engine.
        """
        done: Future[T] = Future()

        def talk() -> None:
            try:
                done.set_result(asyncio.run(work()))
            except BaseException as error:  # noqa: BLE001 it is raised in the thread that waits
                done.set_exception(error)
            finally:
                # Wakes the engine's thread, which waits without a limit while its batch is empty.
                self._inbox.put(None)

        thread = threading.Thread(target=talk, name="episodes", daemon=True)
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
            for place, engine in enumerate(self._engines):
                # The engines go on to live: what is left here would be computed with their next batch.
                engine.abort_request([name for name, ask in self._waiting.items() if ask.engine == place])
            self._waiting.clear()

    def _admit_requests(self) -> bool:
        """Bring the inbox into the batch; wait for it while the batch is empty, and a moment while most turns are about to
        come. Return False at the end."""
        # More turns may be about to come than are in the batch: a step for the few that are left would cost nearly as much.
        patient = self._expected_turns > len(self._waiting)
        began = time.monotonic()
        until, latest = began + FIRST_WAIT_S, began + MAX_WAIT_S
        while True:
            moment = max(0.0, min(until, latest) - time.monotonic()) if patient and self._expected_turns else 0.0
            try:
                # Without a turn in the batch there is nothing to step, so the wait has no limit.
                item = self._inbox.get(timeout=moment if self._waiting else None)
            except queue.Empty:
                # They did not come in time, and are not waited for a second time.
                self._expected_turns = 0 if patient else self._expected_turns
                return True
            if item is None:
                return False
            if isinstance(item, _TurnCancelled):
                self._remove_request(item.ask)
                continue
            now = time.monotonic()
            until, latest = now + NEXT_WAIT_S, latest if self._waiting else now + MAX_WAIT_S
            self._add_request(item)
            self._expected_turns = max(0, self._expected_turns - 1)

    def _add_request(self, ask: _TurnRequest) -> None:
        self._num_requests += 1
        name = str(self._num_requests)
        self._waiting[name] = ask
        self._engines[ask.engine].add_request(name, {"type": "token", "prompt_token_ids": ask.token_ids}, ask.params)

    def _remove_request(self, ask: _TurnRequest) -> None:
        for name in [name for name, waiting in self._waiting.items() if waiting is ask]:
            self._engines[ask.engine].abort_request([name])
            del self._waiting[name]

    def _step(self) -> None:
        """Step every engine that has something to do. One thread steps all: vLLM's state of a forward pass is the process's."""
        at_work = {ask.engine for ask in self._waiting.values()}
        ended: list[tuple[_TurnRequest, Settle]] = []
        try:
            for output in chain.from_iterable(self._engines[index].step() for index in sorted(at_work)):
                if output.finished and output.request_id in self._waiting:
                    turn = self._finish_turn(
                        output.outputs[0]
                    )  # may raise, and then the ask still waits for `_fail_requests`
                    ended.append((self._waiting.pop(output.request_id), methodcaller("set_result", turn)))
        finally:
            # Also where a later output raised: these turns are whole, and their episodes wait for them.
            self._expected_turns += len(ended)
            _settle_turns(ended)

    def _finish_turn(self, output: Any) -> SampledTurn:
        generated = self._sampling.read(output)
        return SampledTurn(
            token_ids=generated.token_ids,
            logprobs=generated.logprobs,
            stop_reason=generated.stop_reason,
            policy_version=self._sampling.policy_version,
        )

    def _fail_requests(self, error: BaseException) -> None:
        """Fail all turns that are waited for or still in the inbox, so that nobody waits for ever."""
        # First of all: a turn that is put into the inbox from now on sees it in `sample_turn`.
        self._failed = f"the engine failed: {error}"
        asks = list(self._waiting.values())
        with suppress(queue.Empty):
            while True:
                item = self._inbox.get_nowait()
                asks += [item] if isinstance(item, _TurnRequest) else []
        _settle_turns([(ask, lambda future: future.set_exception(RunError(self._failed))) for ask in asks])


@dataclass(frozen=True, slots=True)
class _AddedEngine:
    """Implements `opd.interfaces.TokenEngine` for one of the other engines of a batch."""

    batch: BatchEngine
    engine: int

    async def generate(self, token_ids: Sequence[int], *, max_tokens: int, seed: int) -> SampledTurn:
        return await self.batch.sample_turn(token_ids, max_tokens, seed, engine=self.engine)


def _settle_turns(ended: Sequence[tuple[_TurnRequest, Settle]]) -> None:
    """Settle turns in the one loop that waits for them: in one call, because each call wakes its thread."""

    def settled() -> None:
        for ask, settle in ended:
            if not ask.future.done():
                settle(ask.future)

    if ended:
        with suppress(RuntimeError):  # the loop has ended, so nobody waits
            ended[0][0].loop.call_soon_threadsafe(settled)
