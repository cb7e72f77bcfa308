"""The exception for a row of a prompts file that cannot be read."""

from __future__ import annotations

from opd.errors import PromptError


class BrokenRow(Exception):
    """A fault of a row, and how to fix it. The reader of the file, which knows the row's place, makes an error of it."""

    def __init__(self, fault: str, fix: str) -> None:
        super().__init__(fault)
        self.fault, self.fix = fault, fix

    def make_error(self, where: str, *, wanted: str) -> PromptError:
        """Return the error that the user sees."""
        return PromptError.at(where, found=self.fault, wanted=wanted, fix=self.fix)
