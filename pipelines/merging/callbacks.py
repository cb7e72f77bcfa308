"""The surroundings of a merge: the display, signals and sinks of a terminal, or of a program that called it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass

from opd.interfaces import Sink
from opd.live.displays import Displays, open_display
from pipelines.interrupts import Interrupts, interrupts


@dataclass(frozen=True, slots=True, kw_only=True)
class MergeCallbacks:
    """Display, signals and sinks of a merge. The defaults are those of the command line."""

    display: Displays = open_display
    signals: Callable[[], AbstractContextManager[Interrupts]] = interrupts
    """Makes the context in which signals are handled; its value says whether to stop after the current step."""
    sinks: tuple[Sink, ...] = ()
    """Receivers of the record of every step, called after the metrics file is written."""


TERMINAL = MergeCallbacks()
"""Those of the command line."""
