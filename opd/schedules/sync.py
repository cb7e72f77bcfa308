"""The roles take turns: the student writes a step's responses with the very weights that the step trains."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from opd.records.types import Prompt, RolloutBatch
from opd.schedules.spec import ScheduleSpec, TimedWriter


class SyncSchedule:
    """Implements `opd.interfaces.Schedule`."""

    STEPS_AHEAD: ClassVar[int] = 0
    """Steps that prompts are taken ahead of the step that is trained."""

    def __init__(self, spec: ScheduleSpec) -> None:
        self.max_staleness = spec.max_staleness
        self._writer = TimedWriter(spec.engine)
        self._engine = spec.engine if spec.sleeps else None

    def rollouts(self, step: int, policy_version: int, prompts: Sequence[Prompt]) -> RolloutBatch:
        """Have the responses of this step written now."""
        return self._writer.write(step, policy_version, prompts)

    def sleep_engines(self) -> None:
        """Put the engine to sleep: the push before has woken it, and after an empty `answer` it sleeps."""
        if self._engine is not None:
            self._engine.answer(())

    def begin_next(self, step: int, policy_version: int) -> None:
        """Begin nothing: the weights that write `step` come from the step before it."""

    def finish_writing(self) -> None:
        """Return at once: nothing is being written."""

    def carried(self, step: int) -> dict[str, bytes]:
        """Carry nothing: the weights of the checkpoint write what comes next."""
        return {}

    def take_busy_s(self) -> float:
        """Return the seconds that the engine wrote since the last call."""
        return self._writer.take_seconds()
