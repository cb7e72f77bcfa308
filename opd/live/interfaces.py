"""Protocols that a merge needs of its display."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Protocol

from opd.records.step import StepRecord


class Display(Protocol):
    """A display of a run that goes on."""

    def say(self, line: str) -> None:
        """A sentence for the user. A signal's handler calls this too, in the middle of whatever goes on."""
        ...

    def doing(self, activity: str) -> None:
        """The run does this now, until it says something else: a phase of a step by its name, or a few words."""
        ...

    def exams(
        self, before: Mapping[str, float], expert: Mapping[str, float], clear: Collection[str] | None = None
    ) -> None:
        """Accuracy by domain of the student as it started, and of the experts; in `clear` domains these are better beyond chance.
        None: not known."""
        ...

    def step(self, record: StepRecord) -> None:
        """A step is done."""
        ...
