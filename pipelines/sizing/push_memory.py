"""Bytes that a push of new weights takes on GPUs, in a trainer's rank and in an engine."""

from __future__ import annotations

from opd.config import PipelineConfig
from opd.settings.strict import DTYPE_BYTES
from pipelines.sizing.memory import bucket_bytes, gathered_bytes, largest_matrix
from pipelines.sizing.models import MergeModels


def sending_bytes(config: PipelineConfig, models: MergeModels) -> int:
    """Return the most bytes that one rank on a GPU adds in a push: a gathered weight, what is made of it, and the two buffers of a direct
    push; or what it gathers afterwards, to score the probe.

    Of a LoRA student that is what an adapter adds to the weight and the weight itself, both in float32. Of a mixture it is a copy of the
    two first matrices of a layer's experts, which the files have apart.
    """
    width, matrix, largest = (
        DTYPE_BYTES[config.trainer.dtype],
        largest_matrix(models),
        models.read_body(models.student).largest,
    )
    fused = 2 * largest // 3 if largest > matrix and not models.lora else 0
    exported = max(matrix, fused) * width + (8 * matrix if models.lora else fused * width)
    buffers = 2 * bucket_bytes(config, models) if config.push_kind == "direct" else 0
    return max(exported + buffers, gathered_bytes(config, models))


def receiving_bytes(config: PipelineConfig, models: MergeModels, devices: int) -> int:
    """Return the most bytes that each GPU of an engine of `devices` GPUs adds in a push: its part of the layer that vLLM fills before it
    replaces the old one, and of a direct push the buckets whose layers are not complete."""
    body = models.read_body(models.student)
    # vLLM keeps the two first matrices of an MLP as one, and the experts of a layer.
    layer = max(2 * models.student.hidden_size * body.widest, 0 if models.lora else body.largest)
    layer = layer * DTYPE_BYTES[config.rollout.dtype] // devices
    return layer + (2 * bucket_bytes(config, models) if config.push_kind == "direct" else 0)
