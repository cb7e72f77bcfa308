"""Ctrl-C, and SIGTERM, which clusters send: the first signal lets a merge finish its step, the second ends it at once."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from opd.machine.signals import end_at_once, postpone_signal, wait_for_sender
from opd.run.paths import RunPaths
from opd.text import quote_for_shell

NAMES = {signal.SIGINT: "Ctrl-C", signal.SIGTERM: "SIGTERM"}


class Stopped(KeyboardInterrupt):
    """A signal that ends the run now."""

    def __init__(self, number: int) -> None:
        super().__init__(NAMES[signal.Signals(number)])
        self.number = number


class Interrupted(Exception):
    """A merge ended after a signal; the last checkpoint in its run directory `root` is of `step` (0: there is none)."""

    def __init__(self, step: int, root: Path, number: int, *, died: Exception | None = None) -> None:
        """`died`: the worker's death that kept the merge from finishing its step."""
        go_on = f"go on with `opd merge --resume {quote_for_shell(RunPaths(root).merge_root)}`"
        message = f"stopped after step {step}, checkpoint written; {go_on}"
        if died is not None:
            message = (
                f"stopped, last checkpoint of step {step}; {go_on}. After a signal no worker is started again: {died}"
            )
        super().__init__(message)
        self.number = number
        """The number of the signal."""


class Interrupts:
    """The signals that have come so far."""

    def __init__(self) -> None:
        self.number = 0
        """The number of the first signal; 0 if none came."""
        self._ask: Callable[[str], None] | None = None
        self._ending = False

    def should_leave(self) -> bool:
        """Return True if the merge is to leave after this step."""
        return self.number != 0

    @contextmanager
    def handle_first_signal(self, say: Callable[[str], None]) -> Iterator[None]:
        """Make a context in which the first signal only asks the merge to leave, and `say` tells the user. Outside of it there is
        no step to finish, so the first signal ends the run."""
        self._ask = say
        try:
            yield
        finally:
            self._ask = None

    def on_signal(self, number: int, frame: FrameType | None = None) -> None:
        """Handle a signal: ask the merge to leave, end the run, or end the process."""
        # Three cases: the first signal in the loop asks, a signal elsewhere or a second one raises, a third one kills.
        asks = self._ask if not self.number and not self._ending else None
        if postpone_signal(number, frame, raises=not asks and not self._ending):
            return
        if self._ending:
            end_at_once(number)
        self.number = self.number or number
        if asks:
            asks(f"{NAMES[signal.Signals(number)]}: finishing this step, then a checkpoint; once more ends at once")
            return
        self._ending = True
        raise Stopped(number)


@contextmanager
def interrupts() -> Iterator[Interrupts]:
    """Make a context in which SIGINT and SIGTERM are handled. In other threads than the main one no signal ever arrives.

    A nested call returns the object of the outer one.
    """
    # The handler of an outer call is `on_signal`, bound to the object that it yielded.
    outer = getattr(signal.getsignal(signal.SIGINT), "__self__", None)
    if isinstance(outer, Interrupts):
        yield outer
        return
    signals = Interrupts()
    if threading.current_thread() is not threading.main_thread():
        yield signals
        return
    handlers = {number: signal.signal(number, signals.on_signal) for number in NAMES}
    try:
        yield signals
    finally:
        wait_for_sender()  # before other handlers are back: they would take a postponed signal for a new one
        for number, handler in handlers.items():
            signal.signal(number, handler)
