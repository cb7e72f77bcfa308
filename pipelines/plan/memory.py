"""Memory of each role's workers, and whether it fits. What the parts are made of is known by `pipelines/inputs/memory.py`."""

from __future__ import annotations

from dataclasses import dataclass

from opd.config import PipelineConfig
from opd.config.devices import rollout_devices, teacher_devices
from opd.config.teachers import TransformersTeachers, VLLMTeachers
from opd.payloads import answer_class
from opd.settings.strict import DTYPE_BYTES
from pipelines.inputs.gpu_memory import CONTEXT, GpuPhase, gpu_roles, memory_phases, scoring_gpu_bytes
from pipelines.inputs.memory import (
    ROLLOUT_PROCESS,
    TEACHER_PROCESS,
    engine_bytes,
    estimate_memory,
    gathered_bytes,
    heads_bytes,
    micro_batch_bytes,
    rank_bytes,
    scoring_bytes,
    summed_bytes,
    trainer_state,
)
from pipelines.plan.models import Models
from pipelines.plan.spec import ClusterSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPart:
    """A part of what one worker holds."""

    role: str
    part: str
    nbytes: float
    """Bytes on each of its devices, or in its process where there are no GPUs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryRoom:
    """Memory of one device, or of a machine without GPUs."""

    what: str
    needed: float
    there: int

    @property
    def fits(self) -> bool:
        return self.needed <= self.there


def memory_parts(config: PipelineConfig, models: Models, spec: ClusterSpec, cache: float) -> list[MemoryPart]:
    """Every part of every role; `cache` are the bytes of keys and values on each device of an engine."""
    inputs, ranks, width = models.inputs, config.trainer.ranks, DTYPE_BYTES[config.rollout.dtype]
    parts = {part: nbytes / ranks for part, nbytes in trainer_state(config, inputs).items()}
    parts["gathered weights"] = gathered_bytes(config, inputs)
    parts["gradients on their way to the sum over ranks"] = summed_bytes(config, inputs.trained)
    parts["activations and logits of a micro-batch"] = micro_batch_bytes(config, inputs)
    if answer_class(config.teachers.payload).SENDS_HEADS:
        parts["teachers' output heads"] = heads_bytes(config, inputs)
        parts["target rows of a step (host)"] = target_bytes(config, models) * models.opinions / ranks
    memory = [MemoryPart(role="trainer rank", part=part, nbytes=nbytes) for part, nbytes in parts.items()]
    on_gpus, devices = spec.machine.gpus > 0, max(1.0, rollout_devices(config.cluster, config.rollout))
    weights, working = engine_bytes(config, inputs)
    if on_gpus:  # a GPU engine takes new weights in place and keeps no packed copy
        weights = inputs.student.parameters * width
    engine = {"weights": weights / devices, "logits and activations": working / devices, "key-value cache": cache}
    memory += [MemoryPart(role="rollout engine", part=part, nbytes=nbytes) for part, nbytes in engine.items()]
    if config.teachers.scoring_workers and models.scorers:
        engine_divides = isinstance(config.teachers, VLLMTeachers) or not on_gpus
        weights, passing = (scoring_bytes if engine_divides else scoring_gpu_bytes)(config, inputs)
        devices = max(1.0, teacher_devices(config.cluster, config.teachers)) if engine_divides else 1.0
        stays = isinstance(config.teachers, TransformersTeachers) and config.teachers.gpu_memory and on_gpus
        part = "weights of the teachers that stay there" if stays else "weights of one teacher"
        memory.append(MemoryPart(role="scoring worker", part=part, nbytes=weights / devices))
        memory.append(MemoryPart(role="scoring worker", part="activations of one pass", nbytes=passing / devices))
    return memory


def fullest_workers(config: PipelineConfig, models: Models) -> dict[str, int]:
    """Role -> most bytes of one of its workers on a machine without GPUs, its process included: the sum of `opd check`, by role.

    Not all parts are there at one time, so this can be less than the sum of `memory_parts`.
    """
    needs = estimate_memory(config, models.inputs)

    def of(role: str) -> int:
        return sum(need.nbytes for need in needs if need.part.startswith(role))

    sizes = {
        "trainer rank": rank_bytes(needs),
        "rollout engine": ROLLOUT_PROCESS + of("rollout:") // config.rollout.workers,
    }
    scorers = config.teachers.scoring_workers if models.scorers else 0
    return sizes | ({"scoring worker": TEACHER_PROCESS + of("teachers:") // scorers} if scorers else {})


def target_bytes(config: PipelineConfig, models: Models, response: float | None = None) -> float:
    """Bytes of one target row's payload with so many trained tokens; default: as many as a response may have."""
    per_token = answer_class(config.teachers.payload).token_bytes(
        hidden_size=max((shape.hidden for shape in models.scorers.values()), default=0),
        itemsize=DTYPE_BYTES[config.teachers.dtype],
        top_k=config.objective.top_k,
    )
    return per_token * (config.rollout.max_new_tokens if response is None else response)


def cache_bytes(config: PipelineConfig, models: Models, spec: ClusterSpec) -> float:
    """Bytes for keys and values on each device of an engine: what its share of a GPU leaves, or `rollout.kv_cache_gib`."""
    if not spec.machine.gpus:
        return config.rollout.kv_cache_gib << 30
    devices = max(1.0, rollout_devices(config.cluster, config.rollout))
    weights = models.inputs.student.parameters * DTYPE_BYTES[config.rollout.dtype] / devices
    working = engine_bytes(config, models.inputs)[1] / devices
    return max(0.0, config.rollout.gpu_memory_utilization * spec.machine.gpu_memory - weights - working)


def cache_copies(config: PipelineConfig, models: Models, spec: ClusterSpec) -> float:
    """How often an engine holds the keys and values of a token: machines divide sequences, the devices of a machine heads."""
    together = min(max(1.0, rollout_devices(config.cluster, config.rollout)), max(1, spec.machine.gpus))
    return max(1.0, together / models.student.attention.kv_split)


def cache_tokens(config: PipelineConfig, models: Models, spec: ClusterSpec, cache: float) -> float:
    """Tokens whose keys and values fit into `cache` bytes on each device of an engine."""
    a_token = models.student.attention.kv_values * DTYPE_BYTES[config.rollout.dtype]
    devices = max(1.0, rollout_devices(config.cluster, config.rollout))
    return cache * devices / (a_token * cache_copies(config, models, spec))


def memory_rooms(config: PipelineConfig, models: Models, spec: ClusterSpec, shared: bool) -> list[MemoryRoom]:
    """Return the bytes needed and available, of the fullest device, or of the whole merge on a machine without GPUs."""
    if not spec.machine.gpus:
        needed = sum(need.nbytes for need in estimate_memory(config, models.inputs))
        return [MemoryRoom(what="all machines", needed=needed, there=spec.machines * spec.machine.memory)]
    size = spec.machine.gpu_memory
    kinds = {role.name: role for role in gpu_roles(config, models.inputs)}
    rooms = [
        MemoryRoom(
            what=f"{role.name}: its share and its weights", needed=role.least + CONTEXT, there=round(role.share * size)
        )
        for role in kinds.values()
        if role.share
    ]
    together = [list(kinds.values())] if shared else [[role] for role in kinds.values()]
    for devices_roles in together:
        worst: GpuPhase = max(memory_phases(devices_roles), key=lambda phase: phase.total(size))
        names = " + ".join(name for name, _, _ in worst.parts)
        rooms.append(MemoryRoom(what=names, needed=worst.total(size), there=size))
    return rooms
