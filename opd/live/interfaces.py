"""The interface of a merge's display."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from opd.records.step import StepRecord


class Display:
    """Shows a running merge to the user. This class shows nothing; errors and the result are printed all the same."""

    def say(self, line: str) -> None:
        """Tell the user a sentence. A signal handler may call this too, in the middle of any other call."""

    def doing(self, activity: str) -> None:
        """Show what the run does from now on: `activity` is the name of a step's phase, or a few words."""

    def exams(
        self, before: Mapping[str, float], expert: Mapping[str, float], clear: Collection[str] | None = None
    ) -> None:
        """Take the accuracies by domain of the student as it started and of the experts. `clear`: the domains in which the
        expert is better beyond chance; None if that is not known."""

    def step(self, record: StepRecord) -> None:
        """Show that a step is done."""
