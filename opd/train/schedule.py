"""Learning rate as a pure function of the step, so a resume has nothing to restore."""

from __future__ import annotations

import math

from opd.config.sections import TrainerConfig


def learning_rate(step: int, config: TrainerConfig) -> float:
    """Rate of optimiser step `step` (from 1): linear warm-up, then constant, linear or cosine decay."""
    if step <= config.warmup_steps:
        return config.lr * step / config.warmup_steps
    if config.lr_scheduler_type == "constant":
        return config.lr
    done = (step - config.warmup_steps) / max(1, config.steps - config.warmup_steps)
    shape = 1 - done if config.lr_scheduler_type == "linear" else 0.5 * (1 + math.cos(math.pi * done))
    return config.lr * (config.min_lr_ratio + (1 - config.min_lr_ratio) * shape)
