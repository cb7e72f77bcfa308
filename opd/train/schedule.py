"""The learning rate as a function of the step alone, so that a resume has nothing to restore."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class LearningRate:
    """Linear warm-up, then a constant rate, or linear or cosine decay."""

    peak: float
    """Rate at the end of the warm-up."""
    steps: int
    """Optimiser steps of the whole run; the decay ends with the last one."""
    warmup_steps: int = 0
    """Steps in which the rate rises linearly; the last of them has `peak`."""
    decay: str = "constant"
    """Course of the rate after the warm-up: `constant`, `linear` or `cosine`."""
    floor: float = 0.0
    """Rate at the end of a linear or cosine decay, as a share of `peak`. A decay to 0 reaches 0 one step after the run's last
    step, because the last step has to train too."""
    shorter: tuple[tuple[int, int], ...] = ()
    """For each time that the run was made longer: the last step before that, and `steps` as it was. Up to that step the rate
    decays as in the shorter run; entries are in order."""

    def rate_at_step(self, step: int) -> float:
        """Return the rate of optimiser step `step`, counted from 1."""
        if step <= self.warmup_steps:
            return self.peak * step / self.warmup_steps
        if self.decay == "constant":
            return self.peak
        steps = next((steps for last, steps in self.shorter if step <= last), self.steps)
        end = steps if self.floor else steps + 1
        progress = (step - self.warmup_steps) / max(1, end - self.warmup_steps)
        shape = 1 - progress if self.decay == "linear" else 0.5 * (1 + math.cos(math.pi * progress))
        return self.peak * (self.floor + (1 - self.floor) * shape)
