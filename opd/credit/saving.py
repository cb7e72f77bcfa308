"""A trainer and its credit in one checkpoint: a resume needs both, from the same step.

checkpoints/step-000050/  rank-0.safetensors  trainer.json  credit/rank-0.safetensors  credit/trainer.json  credit/credit.json
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from opd.checkpoints import Saves
from opd.credit.interfaces import Credit
from opd.types import WrittenFile

DIRECTORY = "credit"


class SavedTogether:
    """Implements `opd.checkpoints.Saves`, and loads what it saved."""

    def __init__(self, trainer: Saves, credit: Credit) -> None:
        self._trainer = trainer
        self._credit = credit

    def begin_save(self, path: Path) -> None:
        self._trainer.begin_save(path)
        self._credit.begin_save(path / DIRECTORY)

    def saved(self, wait_s: float) -> Sequence[WrittenFile] | None:
        deadline = time.monotonic() + wait_s
        files = self._trainer.saved(wait_s)
        if files is None:
            return None
        more = self._credit.saved(max(0.0, deadline - time.monotonic()))
        return None if more is None else [*files, *(replace(f, name=f"{DIRECTORY}/{f.name}") for f in more)]

    def load(self, path: Path) -> None:
        self._trainer.load(path)
        self._credit.load(path / DIRECTORY)
