"""A row of a prompts file that cannot be read."""

from __future__ import annotations

from opd.errors import PromptError


class BrokenRow(Exception):
    """The fault of a row, and the way out. The reader of the file adds the row's place."""

    def __init__(self, fault: str, fix: str) -> None:
        super().__init__(fault)
        self.fault, self.fix = fault, fix

    def make_error(self, where: str, *, wanted: str) -> PromptError:
        """Return the refusal that a user reads."""
        return PromptError.at(where, found=self.fault, wanted=wanted, fix=self.fix)
