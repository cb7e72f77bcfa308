"""Calls of an environment, in a thread of its own for each episode and with a deadline for each call; and one thread that reads
turns and requests for all of them."""

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
"""Longer than a thread takes to wake up, shorter than it takes to read a long turn."""
_READER = ThreadPoolExecutor(max_workers=1, thread_name_prefix="reader")
"""One thread, not several: they would take the interpreter from each other and from the loop, and share one tokenizer."""


async def run_in_reader(function: Callable[..., T], *arguments: Any) -> T:
    """Return `function(*arguments)`, run in the thread that reads what policies and programs wrote: the longest turn or request then
    keeps no other episode of the loop waiting. Raises: what the function raises."""
    return await asyncio.get_running_loop().run_in_executor(_READER, _read_and_yield, function, *arguments)


def _read_and_yield(function: Callable[..., T], *arguments: Any) -> T:
    """Run a function in the reader's thread, and let the loop's thread compute after it.

    A tokenizer lets go of the interpreter for a moment in each call and takes it back before the loop's thread has woken up, which also
    begins Python's wait for a forced switch anew: without a pause the loop would stand still until all that waits has been read.
    """
    try:
        return function(*arguments)
    finally:
        time.sleep(PAUSE_S)


async def hand_over(lock: asyncio.Lock) -> None:
    """Wait until no other turn is taken up in this round of the loop: where many end together, it gets to other work between them.
    `lock` is that of all of them."""
    async with lock:
        await asyncio.sleep(0)


class CallFailed(Exception):
    """The call raised; the message is its error's last line."""


class CallOverdue(Exception):
    """The call was not back in time."""


@dataclass(frozen=True, slots=True, eq=False)
class _ThreadJob:
    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    future: asyncio.Future[tuple[Any, str]]
    loop: asyncio.AbstractEventLoop


class OwnThread:
    """Runs functions one after the other in one thread, so that what they make is used in the thread that made it.

    Python cannot end a thread: one that hangs stays behind when its episode ends, and ends with the process.
    """

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._jobs: queue.SimpleQueue[_ThreadJob | None] = queue.SimpleQueue()
        self._last: Callable[[], object] = lambda: None
        threading.Thread(target=self._run_calls, name="environment", daemon=True).start()

    async def call(self, label: str, function: Callable[..., T], *arguments: Any) -> T:
        """Run `function(*arguments)` in the thread; `label` names it in errors. Raises: Failed, Overdue."""
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

    def end_after(self, last: Callable[[], object] = lambda: None) -> None:
        """Let the thread end once it has done what it was given, and `last` after it, for which nobody waits."""
        self._last = last
        self._jobs.put(None)

    def _run_calls(self) -> None:
        while (job := self._jobs.get()) is not None:
            value, error = None, ""
            try:
                value = job.function(*job.arguments)
            except BaseException as problem:  # noqa: BLE001 anybody's code, and signals go to another thread
                error = traceback.format_exception_only(problem)[-1].strip()
            with suppress(RuntimeError):  # the loop has ended, so nobody waits
                job.loop.call_soon_threadsafe(_settle_future, job.future, (value, error))
        with suppress(BaseException):  # the episode broke and was counted before this
            self._last()


def _settle_future(future: asyncio.Future[tuple[Any, str]], result: tuple[Any, str]) -> None:
    if not future.done():
        future.set_result(result)
