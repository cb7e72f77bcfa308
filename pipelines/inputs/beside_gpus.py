"""A line of the sum of a merge's memory, and what roles on GPUs have in the machine's own memory."""

from __future__ import annotations

from dataclasses import dataclass

from opd.config import PipelineConfig
from opd.settings.strict import DTYPE_BYTES
from pipelines.inputs.read import Inputs

STATE_COPY = 12
"""Bytes for each trained weight in the copy that a checkpoint is written from: the weight and both moments in float32."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HostMemoryNeed:
    """One line of the sum."""

    part: str
    nbytes: int
    """Bytes of all processes together, on this machine and outside of GPUs."""
    knobs: str
    """Keys of the pipeline that decide this memory."""
    ranks: int = 0
    """Trainer ranks that hold equal parts of it; 0: other processes have it."""


def gpu_copy_needs(config: PipelineConfig, inputs: Inputs) -> list[HostMemoryNeed]:
    """What trainer ranks copy from their GPUs while a checkpoint is written, and the weights of engines that sleep."""
    needs = []
    if config.cluster.trainer_gpus:
        trained = inputs.trained + (inputs.student.parameters if config.objective.has_critic else 0)
        part, knobs = "copy from GPUs that a checkpoint is written from", "student.model"
        needs.append(HostMemoryNeed(part=part, nbytes=STATE_COPY * trained, knobs=knobs))
    if config.rollout.sleep:
        weights = inputs.student.parameters * DTYPE_BYTES[config.rollout.dtype]
        part, knobs = "weights of engines that sleep", "rollout.sleep, rollout.dtype, rollout.workers"
        needs.append(HostMemoryNeed(part=part, nbytes=config.rollout.workers * weights, knobs=knobs))
    return needs
