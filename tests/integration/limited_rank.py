"""A trainer rank under a limit that writes down how much memory it had.

Its module is loaded into the worker, so it imports no more than the trainer's own does: what a test imports would count.
"""

from __future__ import annotations

import json
import os
import resource
from pathlib import Path

from opd.machine.imports import TRANSFORMERS, import_lightly
from opd.records.types import WrittenFile
from opd.train.rank import RankResult, TrainerRank

MIB = 1 << 20
LIMIT, NOTES = "TEST_RANK_LIMIT", "TEST_RANK_NOTES"
"""Variables that tell a rank how much memory it may have, and where it writes down how much it had."""
RESERVED = 512 * MIB
"""Addresses that hold nothing: the system counts the stacks of the threads that Ray and gloo start, and what malloc takes ahead."""


def kept(what: str) -> int:
    """A number of this process's memory, in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{what}:"))


class LimitedRank(TrainerRank):
    """A trainer rank that the system gives no more memory than the limit; libraries are loaded before it begins."""

    def start(self, address: str, port: int) -> None:
        import_lightly("deepspeed", TRANSFORMERS)
        import peft  # noqa: F401
        from deepspeed import zero  # noqa: F401

        limit = kept("VmData") - kept("RssAnon") + int(os.environ[LIMIT]) + RESERVED
        resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
        super().start(address, port)
        self._note("load")

    def finish_step(self, share: float) -> RankResult:
        found = super().finish_step(share)
        self._note("step")
        return found

    def saved(self, wait_s: float) -> tuple[WrittenFile, ...] | None:
        found = super().saved(wait_s)
        self._note("save")
        return found

    def load(self, path: Path) -> None:
        super().load(path)
        self._note("resume")

    def export(self, path: Path, only_changed: bool = False) -> bool:
        found = super().export(path, only_changed)
        self._note("push" if only_changed else "export")
        return found

    def _note(self, after: str) -> None:
        """Write down the most memory until now, without files and shared memory."""
        most = kept("VmHWM") - kept("RssFile") - kept("RssShmem")
        with (Path(os.environ[NOTES]) / f"rank-{self._rank}-{os.getpid()}").open("a") as file:
            file.write(json.dumps([after, most, kept("VmData")]) + "\n")
