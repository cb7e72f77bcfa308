"""Calls that run in a thread of the driver beside its main thread. They end with the session, whatever error ends it."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from opd.cluster.daemons import refuse_dead_ray
from opd.cluster.errors import WorkerDied
from opd.errors import RunError

if TYPE_CHECKING:
    from opd.cluster.workers import Worker

R = TypeVar("R")

GRACE_S = 10.0
"""Seconds that a session waits for each thread, after it has killed the workers for which the thread may be waiting."""

_running: set[threading.Thread] = set()


class BackgroundCall(Generic[R]):
    """A call that runs in a thread from now on."""

    def __init__(self, work: Callable[[], R], name: str) -> None:
        """Start the thread; `name` is the name of the call in errors."""
        self._name = name
        self._future: Future[R] = Future()

        def run() -> None:
            try:
                self._future.set_result(work())
            except BaseException as error:  # noqa: BLE001 it is raised where the result is wanted
                self._future.set_exception(error)
            finally:
                _running.discard(thread)

        thread = threading.Thread(target=run, daemon=True, name=name)
        _running.add(thread)
        thread.start()

    def result(self, *, timeout_s: float) -> R:
        """Wait for the result. Raises: what the call raised; RunError past the deadline."""
        try:
            return self._future.result(timeout_s)
        except TimeoutError:
            if self._future.done():
                raise
            raise RunError(f"{self._name}: not there after {timeout_s:.0f} s (cluster.phase_timeout_s)") from None


def end_background(workers: Sequence[Worker[Any]]) -> None:
    """End the threads that still run when a session ends, by killing its workers: calls that wait for these then raise.

    This comes before Ray shuts down, because a thread that called Ray afterwards would start a new Ray.
    """
    if not _running:
        return
    with contextlib.suppress(WorkerDied):  # if Ray is gone, the threads notice that themselves
        refuse_dead_ray()
        for worker in workers:
            worker.kill()
    for thread in list(_running):
        thread.join(GRACE_S)
