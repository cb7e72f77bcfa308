"""Student, teachers and trainer take turns: the student writes a step's responses with the weights that the step trains."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from opd.records.types import Prompt, RolloutBatch
from opd.schedules.spec import ScheduleSpec, TimedWriter


class SyncSchedule:
    """Implements `opd.interfaces.Schedule`."""

    STEPS_AHEAD: ClassVar[int] = 0
    """Number of steps between the taking of a step's prompts and its training."""

    def __init__(self, spec: ScheduleSpec) -> None:
        self.max_staleness = spec.max_staleness
        self._writer = TimedWriter(spec.engine)
        self._engine = spec.engine if spec.sleeps else None

    def rollouts(self, step: int, policy_version: int, prompts: Sequence[Prompt]) -> RolloutBatch:
        """Write the responses of this step now, and return them."""
        return self._writer.write(step, policy_version, prompts)

    def sleep_engines(self) -> None:
        """Put the engine to sleep if it is one that sleeps. The last push woke it; it sleeps after every `answer`, even an empty one."""
        if self._engine is not None:
            self._engine.answer(())

    def begin_next(self, step: int, policy_version: int) -> None:
        """Do nothing: `step` is written with weights that the step before it has yet to train."""

    def finish_writing(self) -> None:
        """Do nothing: nothing is being written."""

    def carried(self, step: int) -> dict[str, bytes]:
        """Return nothing: the weights of the checkpoint can write what comes next."""
        return {}

    def take_busy_s(self) -> float:
        """Return the seconds in which the engine wrote since the last call."""
        return self._writer.take_seconds()
