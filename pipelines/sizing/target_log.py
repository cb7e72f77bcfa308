"""Disk that the target log takes, from shapes alone. It is an upper estimate: every response as long as it may be."""

from __future__ import annotations

from opd.config import PipelineConfig
from pipelines.sizing.memory import GIB, STATE_COPY, count_response_tokens, step_rows_bytes
from pipelines.sizing.models import MergeModels

TOKEN_BYTES = 16
"""Bytes of a response token in the file of rollouts: its id, the student's log-prob, its share of prompt, spans and names."""

LEAST_LIMIT = 64 * GIB


def estimate_step_bytes(config: PipelineConfig, models: MergeModels) -> int:
    """Return the most bytes of one step in the log."""
    scored = step_rows_bytes(config, models) if config.target_log.keep == "targets" else 0
    return count_response_tokens(config) * TOKEN_BYTES + scored


def choose_log_limit(config: PipelineConfig, models: MergeModels) -> int:
    """Return the bytes past which the next checkpoint comes early: those of `target_log.max_size`, or so many that a checkpoint does not
    cost more disk than the steps that it frees."""
    return config.target_log.max_size or max(LEAST_LIMIT, STATE_COPY * models.trained)


def estimate_log_bytes(config: PipelineConfig, models: MergeModels) -> int:
    """Return the most bytes of the log: all steps between two checkpoints, and the one in which a checkpoint is written."""
    step = estimate_step_bytes(config, models)
    steps = min(config.checkpoint.every + 1, config.trainer.steps)
    return min(step * steps, max(choose_log_limit(config, models), step))
