"""Common parts of all schedules: their spec, and a writer that measures how long the engine writes."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from opd.interfaces import PromptSource, RolloutEngine, TargetLog
from opd.records.types import Prompt, RolloutBatch


@dataclass(frozen=True, kw_only=True)
class ScheduleSpec:
    """The parts of a merge that a schedule calls, and its limits. Each schedule uses the fields that it needs."""

    prompts: PromptSource
    engine: RolloutEngine
    log: TargetLog
    max_staleness: int
    """Most weight pushes between the writing of a token and its training."""
    timeout_s: float
    """Seconds in which the engine has to write the responses of one step."""
    sleeps: bool = False
    """True if the engine frees its memory after it has written or answered (see `SyncSchedule.sleep_engines`)."""


class TimedWriter:
    """Has the engine write responses, one step at a time, and adds up the seconds."""

    def __init__(self, engine: RolloutEngine) -> None:
        self._engine = engine
        self._seconds = 0.0

    def write(self, step: int, policy_version: int, prompts: Sequence[Prompt]) -> RolloutBatch:
        """Write the responses of a step with the weights that the engine holds. Raises: what the engine raises."""
        began = time.monotonic()
        try:
            return self._engine.generate(prompts, step=step, policy_version=policy_version)
        finally:
            self._seconds += time.monotonic() - began

    def take_seconds(self) -> float:
        """Return the seconds in which the engine wrote since the last call."""
        seconds, self._seconds = self._seconds, 0.0
        return seconds
