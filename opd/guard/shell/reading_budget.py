"""A budget for the work of reading one tool call, because a command of one line can ask for hours of reading."""

from __future__ import annotations

from opd.guard.shell.nodes import UnreadableCommand

MAX_WORK = 1 << 21
"""The most units of work for one call. A unit is about what it takes to parse a character of a script, a microsecond."""
CODE_CHARACTER = 4
"""Units for a character of code in Python or another language."""
COMMAND = 256
"""Units for a command that is gone through; in a loop again for each round."""
ARGUMENT = 32
"""Units for an argument, beside one for each of its characters."""
GLOB = 512
"""Units for an argument with a glob, beside the others, since it may be many paths."""
ITEM = 16
"""Units for an item of an array that an operator changes."""
TRIES_PER_UNIT = 64
"""Characters that a pattern may be compared with for one unit."""


class WorkBudget:
    """The work that is left for one call."""

    def __init__(self) -> None:
        self._remaining = MAX_WORK

    def spend(self, amount: int) -> None:
        """Take so many units off the budget. Raises: UnreadableCommand if it had fewer left."""
        self._remaining -= amount
        if self._remaining < 0:
            raise UnreadableCommand("too much to go through")
