"""Disk that the target log takes, from shapes alone. It is an upper estimate: every response as long as it may be."""

from __future__ import annotations

import shutil
from pathlib import Path

from opd.config import PipelineConfig
from pipelines.sizing.memory import count_response_tokens, count_teachers, format_gib, target_bytes
from pipelines.sizing.models import MergeModels

TOKEN_BYTES = 16
"""Bytes of a response token beside its score, in the file of rollouts and in each scored row: its id, the student's log-prob, its share of
prompt, spans and names."""


def estimate_step_bytes(config: PipelineConfig, models: MergeModels) -> int:
    """Return the most bytes of one step in the log."""
    scored = count_teachers(models) * (target_bytes(config, models) + TOKEN_BYTES)
    return count_response_tokens(config) * (TOKEN_BYTES + (scored if config.target_log.keep == "targets" else 0))


def estimate_log_bytes(config: PipelineConfig, models: MergeModels) -> int:
    """Return the most bytes of the log: all steps between two checkpoints, and the one in which a checkpoint is written."""
    step, limit = estimate_step_bytes(config, models), config.target_log.max_size
    whole = step * min(config.checkpoint.every + 1, config.trainer.steps)
    return whole if limit is None else min(whole, max(limit, step))


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


def suggest_smaller_log(config: PipelineConfig) -> str:
    """Return the keys to change, in words."""
    keys = "checkpoint.every or target_log.max_size" if config.target_log.max_size else "checkpoint.every"
    return f"lower {keys}, set target_log.keep to rollouts, or give a --run-dir on a larger disk"
