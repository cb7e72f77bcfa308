"""What a merge shows and listens to while it goes on: a person at a terminal, or a program that called it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass

from opd.interfaces import Display, Sink
from opd.progress import display
from pipelines.interrupts import Interrupts, interrupts


@dataclass(frozen=True, slots=True, kw_only=True)
class Surroundings:
    """The defaults are those of the command line."""

    display: Callable[[int, int], AbstractContextManager[Display]] = display
    """Takes the steps of the merge and those that are done."""
    signals: Callable[[], AbstractContextManager[Interrupts]] = interrupts
    """Says whether to leave after a step."""
    sinks: tuple[Sink, ...] = ()
    """They get the record of every step, after the metrics file."""


TERMINAL = Surroundings()
