"""Ctrl-C and SIGTERM wait until no module is being imported and no destructor runs.

Python runs a signal handler between any two steps, also inside Python code that C++ called. While torch, vLLM and others are
imported, their C++ code calls Python in places where an exception ends the process ("terminate called after throwing an
instance of 'pybind11::error_already_set'", exit code 134) or is lost. What a `__del__` raises is always lost: Python prints
"Exception ignored" and goes on. So every handler asks `postpone_signal` first.
"""

from __future__ import annotations

import _thread
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import NoReturn

from opd.machine import orphans

POLL_S = 0.05
"""Pause between two checks whether the import is done."""
_IMPORT = "<frozen importlib._bootstrap>"
"""File name of Python's import machinery in a stack."""


class _Signal:
    """A signal that came during an import. Two of them are never equal, even with the same number."""

    def __init__(self, number: int) -> None:
        self.number = number


_pending_signal: _Signal | None = None
_sender_lock = _thread.allocate_lock()
"""Held while `_send_when_safe` checks and sends."""
_is_resent = False
"""True if the next signal is the postponed one that `_send_when_safe` sends, not a second one of the user."""


def postpone_signal(number: int, frame: FrameType | None, raises: bool = True) -> bool:
    """Return True if a handler must do nothing and return, because a module is being imported or a destructor runs.

    The signal is then sent again afterwards. `number` and `frame` are the handler's own arguments. A handler that does not
    raise need not wait, so it passes `raises=False`. A second signal of the user during the import ends the process at once,
    because the import may hang.
    """
    global _pending_signal, _is_resent
    is_resent, _is_resent = _is_resent, False
    if is_resent and not _pending_signal:
        return True  # `_send_when_safe` sent the signal twice, and the handler has taken the first one
    if not raises or not _would_lose_exception(frame):
        _pending_signal = None
        return False
    if _pending_signal and not is_resent:
        end_at_once(number)
    if not _pending_signal:
        _pending_signal = _Signal(number)
        # Not threading.Thread: its start takes a lock, which the interrupted code may hold.
        _thread.start_new_thread(_send_when_safe, (_pending_signal,))
    return True


@contextmanager
def postpone_interrupts() -> Iterator[None]:
    """Make a context in which Ctrl-C still raises KeyboardInterrupt, but never in the middle of an import.

    It does nothing in other threads than the main one, or if another handler than Python's own is in place.
    """
    global _pending_signal
    main = threading.current_thread() is threading.main_thread()
    if not main or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield
        return
    signal.signal(signal.SIGINT, raise_interrupt)
    try:
        yield
    finally:
        pending, _pending_signal = _pending_signal, None
        wait_for_sender()
        signal.signal(signal.SIGINT, signal.default_int_handler)
        if pending:
            raise KeyboardInterrupt


def wait_for_sender() -> None:
    """Wait until a postponed signal that is being sent has arrived.

    Call it before you replace a handler that asks `postpone_signal` by another one, which would take that signal for a new
    one.
    """
    with _sender_lock:
        pass


def end_at_once(number: int) -> NoReturn:
    """End this process and every process that it started: the user has asked a second time."""
    orphans.end_own_processes()
    os._exit(128 + number)


def raise_interrupt(number: int, frame: FrameType | None) -> None:
    """Handle SIGINT: raise KeyboardInterrupt, now or when it is safe."""
    if not postpone_signal(number, frame):
        raise KeyboardInterrupt


def _would_lose_exception(frame: FrameType | None) -> bool:
    """Return True if this frame, or any frame that called it, is an import or a destructor."""
    while frame is not None:
        if frame.f_code.co_filename == _IMPORT or frame.f_code.co_name == "__del__":
            return True
        frame = frame.f_back
    return False


def _send_when_safe(pending: _Signal) -> None:
    """Send the signal to the main thread once its import or destructor is done. This runs in a thread of its own.

    It is sent to the main thread so that it interrupts a system call in which that thread waits. It is sent again until a
    handler has taken it, because a signal that arrives just before such a call does not interrupt the call.
    """
    global _is_resent
    main = threading.main_thread().ident
    assert main is not None
    while True:
        with _sender_lock:
            if _pending_signal is not pending:
                return
            if not _would_lose_exception(sys._current_frames().get(main)):
                _is_resent = True
                signal.pthread_kill(main, pending.number)
        time.sleep(POLL_S)
