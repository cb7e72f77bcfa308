"""A line of the sum of a merge's memory, and what roles on GPUs have in the machine's own memory."""

from __future__ import annotations

from dataclasses import dataclass

from opd.config import PipelineConfig
from opd.settings.strict import DTYPE_BYTES
from pipelines.inputs.read import Inputs

STATE_COPY = 12
"""Bytes for each trained weight in the copy that a checkpoint is written from: the weight and both moments in float32."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Need:
    """One line of the sum."""

    what: str
    nbytes: int
    """Bytes of all processes together, on this machine and outside of GPUs."""
    knobs: str
    """Keys of the pipeline that decide this memory."""
    ranks: int = 0
    """Trainer ranks that hold equal parts of it; 0: other processes have it."""


def waiting_for_gpus(config: PipelineConfig, inputs: Inputs) -> list[Need]:
    """What trainer ranks copy from their GPUs while a checkpoint is written, and the weights of engines that sleep."""
    found = []
    if config.cluster.trainer_gpus:
        trained = inputs.trained + (inputs.student.parameters if config.objective.has_critic else 0)
        what, knobs = "copy from GPUs that a checkpoint is written from", "student.model"
        found.append(Need(what=what, nbytes=STATE_COPY * trained, knobs=knobs))
    if config.rollout.sleep:
        weights = inputs.student.parameters * DTYPE_BYTES[config.rollout.dtype]
        what, knobs = "weights of engines that sleep", "rollout.sleep, rollout.dtype, rollout.workers"
        found.append(Need(what=what, nbytes=config.rollout.workers * weights, knobs=knobs))
    return found
