"""The memory of one worker of each role, part by part."""

from __future__ import annotations

from dataclasses import dataclass

from opd.config import PipelineConfig
from opd.config.devices import teacher_devices
from opd.config.teachers import TransformersTeachers, VLLMTeachers
from pipelines.sizing.cache import engine_devices
from pipelines.sizing.gpu_memory import scoring_gpu_bytes
from pipelines.sizing.memory import (
    cpu_engine_weights,
    engine_activations,
    engine_weights,
    gathered_bytes,
    heads_bytes,
    scores_bytes,
    scoring_bytes,
    sends_heads,
    summed_bytes,
    target_bytes,
    trainer_state,
)
from pipelines.sizing.micro_batch import checkpoint_bytes, micro_batch_parts, moves_checkpoints
from pipelines.sizing.models import MergeModels, divide_models


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPart:
    """A part of the memory of one worker."""

    role: str
    part: str
    nbytes: float
    """Bytes on each of the worker's devices, or in its process if there are no GPUs."""


def worker_parts(
    config: PipelineConfig, models: MergeModels, *, on_gpus: bool, cache: float, rows: int
) -> list[MemoryPart]:
    """Return every part of every role. `cache`: bytes of keys and values on each device of an engine; `rows`: target rows of a step."""
    ranks = config.trainer.ranks
    parts = {part: nbytes / ranks for part, nbytes in trainer_state(config, models).items()}
    parts["gathered weights"] = gathered_bytes(config, models)
    parts["gradients on their way to the sum over ranks"] = summed_bytes(config, models.trained)
    parts |= micro_batch_parts(config, models)
    if moves_checkpoints(config):
        parts["activations at checkpoints (host)"] = checkpoint_bytes(config, models)
    if sends_heads(config):
        parts["teachers' output heads"] = heads_bytes(config, models)
        longest_row = target_bytes(config, models) * config.rollout.max_new_tokens
        parts["target rows of a step (host)"] = longest_row * rows / ranks
    if scores := scores_bytes(config, models):
        parts["an expert's adapter, and teachers' scores of a micro-batch"] = scores
    held = [MemoryPart(role="trainer rank", part=part, nbytes=nbytes) for part, nbytes in parts.items()]
    weights = (engine_weights if on_gpus else cpu_engine_weights)(config, models)
    working = engine_activations(config, models)
    devices = engine_devices(config)
    engine = {"weights": weights / devices, "logits and activations": working / devices, "key-value cache": cache}
    held += [MemoryPart(role="rollout engine", part=part, nbytes=nbytes) for part, nbytes in engine.items()]
    for number, (engine_config, part_models) in enumerate(divide_models(config, models)):
        if engine_config.teachers.scoring_workers and part_models.scorers:
            role = f"scoring worker of engine {number}" if number else "scoring worker"
            held += _scoring_parts(engine_config, part_models, role, on_gpus=on_gpus)
    return held


def _scoring_parts(config: PipelineConfig, models: MergeModels, role: str, *, on_gpus: bool) -> list[MemoryPart]:
    """Return the parts of a scoring worker of one engine."""
    # vLLM divides a teacher evenly among its devices. With transformers on GPUs `scoring_gpu_bytes` has the fullest of them already.
    engine_divides = isinstance(config.teachers, VLLMTeachers) or not on_gpus
    weights, passing = (scoring_bytes if engine_divides else scoring_gpu_bytes)(config, models)
    devices = max(1, teacher_devices(config.cluster, config.teachers).count) if engine_divides else 1
    stay_on_gpu = isinstance(config.teachers, TransformersTeachers) and config.teachers.gpu_memory and on_gpus
    part = "weights of the teachers that stay there" if stay_on_gpu else "weights of one teacher"
    return [
        MemoryPart(role=role, part=part, nbytes=weights / devices),
        MemoryPart(role=role, part="activations of one pass", nbytes=passing / devices),
    ]
