"""A child process's way to say that a step is over, and to wait until it may go on. Needs nothing but Python.

What libraries print goes to the log, so a child talks through a pipe of its own.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from typing import Any

from benchmarks.merging.case import Case


def started() -> tuple[Case, Turns]:
    """The child's case, and the way to its parent."""
    given = json.loads(sys.argv[1])
    given["options"] = tuple(given["options"])
    return Case(**given), Turns(int(sys.argv[2]))


class Turns:
    """The child's end."""

    def __init__(self, descriptor: int) -> None:
        self._pipe = os.fdopen(descriptor, "w", encoding="utf-8")

    def over(self, said: Mapping[str, Any]) -> None:
        """Tell the parent, and block until it has looked at this process; it takes no time that counts."""
        self._pipe.write(json.dumps(said) + "\n")
        self._pipe.flush()
        sys.stdin.readline()
