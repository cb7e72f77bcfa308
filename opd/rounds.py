"""Where the rounds of a merge lie: its run directory holds `rounds.json` and a run directory for each round."""

from __future__ import annotations

import re
from pathlib import Path

PLAN = "rounds.json"
FORMAT = 1
_NAME = re.compile(r"round-[1-9]\d*")


def directory(root: Path, number: int) -> Path:
    """The run directory of a round, counted from 1."""
    return root / f"round-{number}"


def whole(root: Path) -> Path:
    """The run directory that a user knows: of a round that of all rounds, else `root` itself."""
    outer = root.absolute().parent
    return root.parent if _NAME.fullmatch(root.name) and (outer / PLAN).is_file() else root
