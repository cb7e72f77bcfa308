"""Ctrl-C, and SIGTERM, which clusters send: the first asks a merge to finish its step, the second ends it at once."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from opd.run_dir import RunPaths
from opd.signals import end_at_once, postponed

NAMES = {signal.SIGINT: "Ctrl-C", signal.SIGTERM: "SIGTERM"}


class Stopped(KeyboardInterrupt):
    """A signal that ends the run now."""

    def __init__(self, number: int) -> None:
        super().__init__(NAMES[signal.Signals(number)])
        self.number = number


class Interrupted(Exception):
    """A merge finished its step after a signal, and left a checkpoint of `step` in its run directory `root`."""

    def __init__(self, step: int, root: Path, number: int) -> None:
        super().__init__(
            f"stopped after step {step}, checkpoint written; go on with `opd merge --resume {RunPaths(root).whole}`"
        )
        self.number = number
        """The number of the signal."""


class Interrupts:
    """What came so far."""

    def __init__(self) -> None:
        self.number = 0
        """The number of the first signal; 0 if none came."""
        self._ask: Callable[[str], None] | None = None
        self._ending = False

    def asked(self) -> bool:
        """Whether to leave after this step."""
        return self.number != 0

    @contextmanager
    def asking(self, say: Callable[[str], None]) -> Iterator[None]:
        """Within, the first signal only asks, and `say` tells so; outside it ends the run, as there is no step."""
        self._ask = say
        try:
            yield
        finally:
            self._ask = None

    def on_signal(self, number: int, frame: FrameType | None = None) -> None:
        """The handler."""
        asks = self._ask if not self.number and not self._ending else None
        if postponed(number, frame, raises=not asks and not self._ending):
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
    """Handles both signals within; only the main thread can, elsewhere nothing ever comes.

    Within another `interrupts` it is that one.
    """
    outer = getattr(signal.getsignal(signal.SIGINT), "__self__", None)
    if isinstance(outer, Interrupts):
        yield outer
        return
    found = Interrupts()
    if threading.current_thread() is not threading.main_thread():
        yield found
        return
    before = {number: signal.signal(number, found.on_signal) for number in NAMES}
    try:
        yield found
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
