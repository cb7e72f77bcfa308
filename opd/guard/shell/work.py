"""A budget for the reading of a call: a command of one line can ask for hours of reading."""

from __future__ import annotations

from opd.guard.shell.nodes import UnreadableCommand

MAX_WORK = 1 << 21
"""Work on one call. One unit is about a character that is parsed, a microsecond."""
CODE_CHARACTER = 4
"""Work for a character of Python code."""
COMMAND = 256
"""Work for a command that is gone through, once more for each round of a loop."""
ARGUMENT = 32
"""Work for an argument, apart from its characters."""
GLOB = 512
"""Work for an argument that may be many paths."""
ITEM = 16
"""Work for an item of an array that is changed."""
TRIES_PER_UNIT = 64
"""Characters that a pattern is tried on for one unit."""


class WorkBudget:
    """The budget that is left for one call."""

    def __init__(self) -> None:
        self._remaining = MAX_WORK

    def spend(self, amount: int) -> None:
        """Raises: UnreadableCommand once there was too much."""
        self._remaining -= amount
        if self._remaining < 0:
            raise UnreadableCommand("too much to go through")
