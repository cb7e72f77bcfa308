"""The threads beside the loop of all episodes: one for each episode, which makes the calls of its environment with a deadline each;
and a single one that reads turns and requests for all episodes."""

from __future__ import annotations

import asyncio
import queue
import threading
import time
import traceback
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypeVar

T = TypeVar("T")
PAUSE_S = 0.0002
"""Pause of the reader's thread after each job, in seconds: longer than a thread takes to wake up, shorter than reading a long turn
takes."""
_READER = ThreadPoolExecutor(max_workers=1, thread_name_prefix="reader")
"""A single thread: several would take the interpreter from each other and from the loop, and would share one tokenizer."""


async def run_in_reader(function: Callable[..., T], *arguments: Any) -> T:
    """Return `function(*arguments)`, run in the thread that reads what policies and programs wrote: the longest turn or request then
    keeps no other episode of the loop waiting. Raises: what the function raises."""
    return await asyncio.get_running_loop().run_in_executor(_READER, _read_and_yield, function, *arguments)


def _read_and_yield(function: Callable[..., T], *arguments: Any) -> T:
    """Run a function in the reader's thread, and pause after it so that the loop's thread can compute.

    In each call a tokenizer releases the interpreter's lock for a moment and takes it back before the loop's thread has woken up. That
    also restarts Python's timer for a forced switch of threads. Without the pause the loop would stand still until the reader has no
    more jobs.
    """
    try:
        return function(*arguments)
    finally:
        time.sleep(PAUSE_S)


async def hand_over(lock: asyncio.Lock) -> None:
    """Let only one turn go on in each round of the loop. Where many turns end together, the loop gets to other work between them.
    All turns that may end together pass the same `lock`."""
    async with lock:
        await asyncio.sleep(0)


class CallFailed(Exception):
    """The call raised; the message is its error's last line."""


class CallOverdue(Exception):
    """The call had not returned at its deadline."""


@dataclass(frozen=True, slots=True, eq=False)
class _ThreadJob:
    """One call that waits for its thread."""

    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    future: asyncio.Future[tuple[Any, str]]
    """Gets the call's value and error; the error is empty if the call did not raise."""
    loop: asyncio.AbstractEventLoop


class OwnThread:
    """Runs functions one after the other in one thread, because an environment may have to be used in the thread that made it.

    Python cannot end a thread: one that hangs stays behind when its episode ends, and ends with the process.
    """

    def __init__(self, timeout_s: float) -> None:
        """`timeout_s` is the deadline of each call."""
        self._timeout_s = timeout_s
        self._jobs: queue.SimpleQueue[_ThreadJob | None] = queue.SimpleQueue()
        self._last: Callable[[], object] = lambda: None
        threading.Thread(target=self._run_calls, name="environment", daemon=True).start()

    async def call(self, label: str, function: Callable[..., T], *arguments: Any) -> T:
        """Run `function(*arguments)` in the thread; `label` names it in errors. Raises: CallFailed, CallOverdue."""
        loop = asyncio.get_running_loop()
        job = _ThreadJob(function, arguments, loop.create_future(), loop)
        self._jobs.put(job)
        finished, _ = await asyncio.wait({job.future}, timeout=self._timeout_s)
        if not finished:
            raise CallOverdue(f"{label} was not back after {self._timeout_s:g} s")
        value, error = job.future.result()
        if error:
            raise CallFailed(f"{label}: {error}")
        result: T = value
        return result

    def end_when_idle(self, last: Callable[[], object] = lambda: None) -> None:
        """Have the thread end once it has run all calls that it was given, and after them `last`, for which nobody waits."""
        self._last = last
        self._jobs.put(None)

    def _run_calls(self) -> None:
        while (job := self._jobs.get()) is not None:
            value, error = None, ""
            try:
                value = job.function(*job.arguments)
            except BaseException as problem:  # noqa: BLE001 this is a user's code; and signals go to the main thread
                error = traceback.format_exception_only(problem)[-1].strip()
            with suppress(RuntimeError):  # the loop has ended, so nobody waits
                job.loop.call_soon_threadsafe(_settle_future, job.future, (value, error))
        with suppress(BaseException):  # whatever broke the episode was counted before this
            self._last()


def _settle_future(future: asyncio.Future[tuple[Any, str]], result: tuple[Any, str]) -> None:
    if not future.done():
        future.set_result(result)
