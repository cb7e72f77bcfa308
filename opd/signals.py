"""Ctrl-C and SIGTERM wait until no module is being imported.

Python runs a handler between any two steps, also of Python code that C++ called. While torch, vLLM and others are imported,
their C++ calls Python where an exception ends the process ("terminate called after throwing an instance of
'pybind11::error_already_set'", exit code 134), or swallows it. So whoever handles a signal asks `postponed` first.
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

from opd import leftovers

LOOK_S = 0.05
"""How often to look whether the import is done."""
_IMPORT = "<frozen importlib._bootstrap>"


class _Signal:
    """One that came during an import; equal to no other."""

    def __init__(self, number: int) -> None:
        self.number = number


_waiting: _Signal | None = None
_again = False
"""Whether the next signal is the one that waited, and not a second one of the user."""


def postponed(number: int, frame: FrameType | None, raises: bool = True) -> bool:
    """Whether a handler, which has got the first two, is to return and do nothing: the signal comes again after the import.

    `raises` says whether the handler would raise; another one need not wait. A second signal of the user meanwhile ends the
    process at once: the import may hang.
    """
    global _waiting, _again
    again, _again = _again, False
    if again and not _waiting:
        return True  # sent twice, and taken the first time
    if not raises or not _importing(frame):
        _waiting = None
        return False
    if _waiting and not again:
        end_at_once(number)
    if not _waiting:
        _waiting = _Signal(number)
        # Not threading.Thread: to start one takes a lock, which the code that was interrupted may hold.
        _thread.start_new_thread(_send_after_import, (_waiting,))
    return True


@contextmanager
def patient() -> Iterator[None]:
    """Within, Ctrl-C raises KeyboardInterrupt as always, but not in the middle of an import; only in the main thread."""
    global _waiting
    main = threading.current_thread() is threading.main_thread()
    if not main or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield
        return
    signal.signal(signal.SIGINT, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        came, _waiting = _waiting, None
        if came:
            raise KeyboardInterrupt


def end_at_once(number: int) -> NoReturn:
    """With all that this process started, and nothing else: somebody has asked for it a second time."""
    leftovers.end_own()
    os._exit(128 + number)


def interrupt(number: int, frame: FrameType | None) -> None:
    if not postponed(number, frame):
        raise KeyboardInterrupt


def _importing(frame: FrameType | None) -> bool:
    """Whether what runs there was called, however far up, by an import."""
    while frame is not None:
        if frame.f_code.co_filename == _IMPORT:
            return True
        frame = frame.f_back
    return False


def _send_after_import(one: _Signal) -> None:
    """In a thread: to the main one, so that a system call that it waits in ends; until it is taken, since one that comes
    just before such a call does not end it."""
    global _again
    main = threading.main_thread().ident
    assert main is not None
    while _waiting is one:
        if not _importing(sys._current_frames().get(main)):
            _again = True
            signal.pthread_kill(main, one.number)
        time.sleep(LOOK_S)
