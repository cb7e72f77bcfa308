"""Disk that the target log takes, from shapes alone. It is an upper estimate: every response as long as it may be."""

from __future__ import annotations

import shutil
from pathlib import Path

from opd.config import PipelineConfig
from pipelines.sizing.memory import GIB, STATE_COPY, count_response_tokens, format_gib, step_rows_bytes
from pipelines.sizing.models import MergeModels

TOKEN_BYTES = 16
"""Bytes of a response token in the file of rollouts: its id, the student's log-prob, its share of prompt, spans and names."""

LEAST_LIMIT = 64 * GIB
SMALLER_LOG = "lower checkpoint.every or target_log.max_size, set target_log.keep to rollouts, or give a --run-dir on a larger disk"
"""Ways to make the log smaller, in words."""


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


def describe_log(config: PipelineConfig, models: MergeModels) -> str:
    """Return in words how much the log takes."""
    step, whole = (format_gib(estimate(config, models)) for estimate in (estimate_step_bytes, estimate_log_bytes))
    return f"target log: at most {step} GiB a step, {whole} GiB until a checkpoint frees it"


def find_full_disk(needed: int, directory: Path) -> str | None:
    """Return in words that the disk of `directory`, which need not exist yet, has no room for a log of `needed` bytes; None if it has."""
    existing = next(path for path in (directory.absolute(), *directory.absolute().parents) if path.exists())
    free = shutil.disk_usage(existing).free
    if needed <= free:
        return None
    return f"the target log takes up to {format_gib(needed)} GiB, and the disk of {directory} has {format_gib(free)} GiB free"
