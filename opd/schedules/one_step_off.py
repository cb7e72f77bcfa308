"""While a step is scored and trained, the student writes the responses of the next one with the weights before the step.

    step k     engine   │ write k+1 with version k-1 ──┐
               teachers │ score k ──┐                  │
               trainer  │           └─ train k ─┐      │
                                                └──────┴─ push version k ─▶ step k+1

So a response was written one version before the weights that are trained on it. At the states that it visits the loss is still exact,
because the trainer computes log-probs of its own. Only the choice of the states lags behind.

A resume never needs weights that do not exist any more. Responses are in the target log as soon as they are written, and a checkpoint
of step k contains those of step k+1, which version k-1 wrote. All later versions exist again when their steps are trained again.
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
    """Number of steps between the taking of a step's prompts and its training."""

    def __init__(self, spec: ScheduleSpec) -> None:
        self.max_staleness = spec.max_staleness
        self._spec = spec
        self._writer = TimedWriter(spec.engine)
        self._writing: tuple[int, BackgroundCall[RolloutBatch]] | None = None
        self._batches_ahead: dict[int, RolloutBatch] = {}
        """Step -> its rollouts, which were written before it began."""

    def rollouts(self, step: int, policy_version: int, prompts: Sequence[Prompt]) -> RolloutBatch:
        """Return the rollouts that were written during the step before, by this process or by an earlier one of the run.

        For a run's first step there are none, so they are written now.
        """
        # They were written with the version before this one, while the step before was trained.
        batch = self._batches_ahead.pop(step, None) or self._spec.log.written(step, policy_version - 1, prompts)
        return batch or self._writer.write(step, policy_version, prompts)

    def sleep_engines(self) -> None:
        """Do nothing: with this schedule engines never sleep."""

    def begin_next(self, step: int, policy_version: int) -> None:
        """Begin to write the responses of `step` in a thread, unless the log has them already."""
        prompts = self._spec.prompts.take(step)
        logged = self._spec.log.written(step, policy_version, prompts)
        if logged is not None:
            self._batches_ahead[step] = logged
            return

        def write() -> RolloutBatch:
            batch = self._writer.write(step, policy_version, prompts)
            self._spec.log.keep_written(step, policy_version, prompts, batch)
            return batch

        self._writing = step, BackgroundCall(write, f"rollouts of step {step}")

    def finish_writing(self) -> None:
        """Wait until the engine has written, so that its weights may be replaced.

        Raises: what the engine raised; RunError past the deadline.
        """
        if self._writing is not None:
            step, writing = self._writing
            # Only one step is written ahead, so an earlier one's rollouts were taken already, and may be replaced.
            self._batches_ahead = {step: writing.result(timeout_s=self._spec.timeout_s)}
            self._writing = None

    def carried(self, step: int) -> dict[str, bytes]:
        """Return the files with the responses of step `step` + 1, which the weights of a checkpoint of `step` could not write again."""
        return self._spec.log.written_files(step + 1)

    def take_busy_s(self) -> float:
        """Return the seconds in which the engine wrote since the last call."""
        return self._writer.take_seconds()
