"""While a step is scored and trained, the student writes the responses of the next one with the weights before the step.

    step k     engine   │ write k+1 with version k-1 ──┐
               teachers │ score k ──┐                  │
               trainer  │           └─ train k ─┐      │
                                                └──────┴─ push version k ─▶ step k+1

So a response is one version behind the weights that are trained on it. At the states that it visits the loss is exact all
the same, because the trainer computes its own log-probs; only which states are visited lags behind.

A resume never needs weights that are gone. Responses are in the log as soon as they are written, and a checkpoint of step k
carries those of step k+1, which version k-1 wrote. Every later version comes back when its steps are trained again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from opd.cluster import BackgroundCall
from opd.records.types import Prompt, RolloutBatch
from opd.schedules.spec import ScheduleSpec, TimedWriter


class OneStepOff:
    """Implements `opd.interfaces.Schedule`."""

    STEPS_AHEAD: ClassVar[int] = 1
    """Steps that prompts are taken ahead of the step that is trained."""

    def __init__(self, spec: ScheduleSpec) -> None:
        self.max_staleness = spec.max_staleness
        self._spec = spec
        self._writer = TimedWriter(spec.engine)
        self._writing: tuple[int, BackgroundCall[RolloutBatch]] | None = None
        self._written: dict[int, RolloutBatch] = {}

    def rollouts(self, step: int, policy_version: int, prompts: Sequence[Prompt]) -> RolloutBatch:
        """Return the rollouts that were written during the step before, by this process or by one that was killed.

        Those of a run's first step are written now.
        """
        # The version before wrote them, while the step before was trained.
        batch = self._written.pop(step, None) or self._spec.log.written(step, policy_version - 1, prompts)
        return batch or self._writer.write(step, policy_version, prompts)

    def sleep_engines(self) -> None:
        """Do nothing: with this schedule engines never sleep."""

    def begin_next(self, step: int, policy_version: int) -> None:
        """Let the engine write the responses of `step` in a thread, unless the log has them."""
        prompts = self._spec.prompts.take(step)
        logged = self._spec.log.written(step, policy_version, prompts)
        if logged is not None:
            self._written[step] = logged
            return

        def write() -> RolloutBatch:
            batch = self._writer.write(step, policy_version, prompts)
            self._spec.log.keep_written(step, policy_version, prompts, batch)
            return batch

        self._writing = step, BackgroundCall(write, f"rollouts of step {step}")

    def finish_writing(self) -> None:
        """Wait for the engine: its weights may be replaced now. Raises: what writing raised; RunError past the deadline."""
        if self._writing is not None:
            step, writing = self._writing
            # One step is written ahead, so what an earlier one had is taken by now.
            self._written = {step: writing.result(timeout_s=self._spec.timeout_s)}
            self._writing = None

    def carried(self, step: int) -> dict[str, bytes]:
        """Return the files with the responses of step `step` + 1: weights older than the checkpoint's wrote them."""
        return self._spec.log.written_files(step + 1)

    def take_busy_s(self) -> float:
        """Return the seconds that the engine wrote since the last call."""
        return self._writer.take_seconds()
