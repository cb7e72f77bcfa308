"""The parts of every schedule: its spec, and the engine with a stopwatch."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from opd.interfaces import PromptSource, RolloutEngine, TargetLog
from opd.records.types import Prompt, RolloutBatch
from opd.rollouts.groups import Early
from opd.rollouts.partial import Cuts


@dataclass(frozen=True, kw_only=True)
class ScheduleSpec:
    """The parts of a merge that a schedule directs, and its bounds. Each schedule uses the fields that it needs."""

    prompts: PromptSource
    engine: RolloutEngine
    log: TargetLog
    max_staleness: int
    """Pushes that may lie between the writing of a token and its training."""
    timeout_s: float
    """Deadline for the responses of one step."""
    cuts: Cuts | None = None
    """Cuts of responses, for a schedule that writes ahead; None: no cuts."""
    sleeps: bool = False
    """True if the engine gives memory back once it has written or answered."""
    last_step: int
    """Last step of the run; its responses are not cut, because no step follows."""


class Writer:
    """Has the engine write a step's responses, one step at a time, and counts the seconds."""

    def __init__(self, engine: RolloutEngine) -> None:
        self._engine = engine
        self._seconds = 0.0

    def write(
        self,
        step: int,
        policy_version: int,
        prompts: Sequence[Prompt],
        cuts: Cuts | None = None,
        early: Early | None = None,
    ) -> RolloutBatch:
        """Write the responses of a step with the weights that the engine holds. Raises: what the engine raises."""
        began = time.monotonic()
        # Passed only if set: an engine that a user brings need not take them.
        more: dict[str, Any] = {k: v for k, v in (("cuts", cuts), ("early", early)) if v is not None}
        try:
            return self._engine.generate(prompts, step=step, policy_version=policy_version, **more)
        finally:
            self._seconds += time.monotonic() - began

    def take_seconds(self) -> float:
        """Return the seconds that the engine wrote since the last call."""
        seconds, self._seconds = self._seconds, 0.0
        return seconds
