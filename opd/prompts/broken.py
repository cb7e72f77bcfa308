"""A row of a prompts file that cannot be read."""

from __future__ import annotations

from opd.errors import PromptError


class BrokenRow(Exception):
    """The fault of a row, and the way out. The reader of the file adds the row's place."""

    def __init__(self, found: str, fix: str) -> None:
        super().__init__(found)
        self.found, self.fix = found, fix

    def make_error(self, where: str, *, wanted: str) -> PromptError:
        """Return the refusal that a user reads."""
        return PromptError.at(where, found=self.found, wanted=wanted, fix=self.fix)
