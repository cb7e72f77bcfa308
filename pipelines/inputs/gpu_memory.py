"""Estimate how much of a GPU each role of a merge takes, from shapes and shares alone, before anything starts.

    trainer rank      weights, gradients, AdamW, gathered weights, teachers' heads; beside them a micro-batch
    scoring worker    one teacher's weights; beside them one pass. Engine vllm: its share
    rollout engine    its whole share, even if it needs less; with rollout.sleep only while it writes

vLLM takes its share of the whole GPU no matter who else is on it, so where roles share a GPU, shares and needs must add up.
This is an upper estimate, like that of `pipelines/inputs/memory.py`. Roles are placed as Ray places them: a worker that wants a
fraction goes to the GPU with the least room that suffices.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from opd.cluster import LOCAL
from opd.config import PipelineConfig
from opd.config.devices import rollout_devices, teacher_devices
from opd.config.drift import count_worker_engines
from opd.config.teachers import TransformersTeachers, VLLMTeachers
from opd.errors import ConfigError
from opd.payloads import answer_class
from opd.settings.strict import DTYPE_BYTES
from pipelines.inputs.gpus import list_gpus
from pipelines.inputs.memory import (
    critic_state_bytes,
    gathered_bytes,
    heads_bytes,
    micro_batch_bytes,
    scoring_bytes,
    summed_bytes,
    teacher_sizes,
    trainer_state_bytes,
)
from pipelines.inputs.read import Inputs

GIB = 1 << 30
CONTEXT = 600 << 20
"""Memory that CUDA and its libraries take for a process before the first tensor."""
ASLEEP = 900 << 20
"""Memory that an engine holds while it sleeps: the same, and its CUDA graphs. 0.87 GiB were measured on an H200, for a tiny model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuRole:
    """One worker on a GPU."""

    name: str
    gpus: float
    """GPUs that Ray hands out to the worker, or a share of one."""
    resident: int = 0
    """Bytes that stay for the whole run, on the fullest of its GPUs."""
    passing: int = 0
    """More bytes on it while the worker computes."""
    share: float = 0.0
    """Share of the whole GPU that a vLLM engine takes; all that it holds lies within."""
    share_key: str = ""
    engines: int = 1
    """vLLM engines of the worker, each with such a share."""
    sleeps: bool = False
    """Holds its share only while the others do not compute."""
    may_sleep: bool = False
    """Whether it could be told to."""
    least: int = 0
    """Bytes without which an engine does not start."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuPhase:
    """The contents of one GPU at one time."""

    parts: tuple[tuple[str, int, float], ...]
    """(name, bytes, share of the GPU) of each part."""

    def total(self, size: int) -> int:
        return sum(nbytes + round(share * size) for _, nbytes, share in self.parts)

    def describe(self, size: int | None = None) -> str:
        """The sum in words, in GiB; a share of a GPU of unknown size is shown as a share."""
        summands = []
        for name, nbytes, share in self.parts:
            if size:
                summands.append(f"{_format_gib(nbytes + round(share * size))} {name}")
            else:
                summands.append(f"{_format_gib(nbytes)} GiB{f' and {share:g} of the GPU' if share else ''} for the {name}")
        return " + ".join(summands)


def refuse_crowded_gpus(config: PipelineConfig, inputs: Inputs) -> list[str]:
    """Check GPU memory; returns what the user should know although nothing is wrong.

    Raises: ConfigError with the sum if roles do not fit on the GPU that they share, or if there are too few GPUs.
    """
    roles = gpu_roles(config, inputs)
    if not roles:
        return []
    sizes = gpu_sizes() if config.cluster.address == LOCAL else []
    if not sizes:
        reason = "this process sees no GPU" if config.cluster.address == LOCAL else "the GPUs are other machines'"
        crowded = max(place_roles(roles), key=len)
        text = max((phase.describe() for phase in memory_phases(crowded)), key=len)
        return [f"{reason}: whether a GPU has room for what it is given is not checked; on one there will be {text}"]
    placed = place_roles(roles)
    if len(placed) > len(sizes):
        raise ConfigError.at(
            "cluster",
            found=f"{len(roles)} workers that need {len(placed)} GPUs, and {len(sizes)} here",
            wanted="a GPU, or a part of one, for every worker, and for each process of an engine",
            fix="give fractions, such as cluster.rollout_gpus 0.4, or fewer workers (trainer.ranks, rollout.workers, "
            "teachers.workers)",
        )
    for together in placed:
        _refuse_crowd(together, min(sizes))
    return []


def gpu_roles(config: PipelineConfig, inputs: Inputs) -> list[GpuRole]:
    """Every worker on a GPU. Reads headers only. Raises: ModelError."""
    cluster, student, roles = config.cluster, inputs.student, []
    if cluster.rollout_gpus:
        engines = count_worker_engines(config.domains)
        engine = GpuRole(
            name="rollout engine" if engines == 1 else "rollout engine and the expert's that writes turns",
            gpus=rollout_devices(cluster, config.rollout),
            share=config.rollout.gpu_memory_utilization,
            share_key="rollout.gpu_memory_utilization",
            engines=engines,
            sleeps=config.rollout.sleep,
            may_sleep=engines == 1 and config.schedule.mode == "sync",
            least=student.parameters * DTYPE_BYTES[config.rollout.dtype] // config.rollout.tensor_parallel_size,
        )
        roles += [engine] * config.rollout.workers
    if cluster.teacher_gpus and not config.teachers.elsewhere:
        roles += [_teacher_memory(config, inputs)] * config.teachers.scoring_workers
    if cluster.trainer_gpus:
        heads = heads_bytes(config, inputs) if answer_class(config.teachers.payload).SENDS_HEADS else 0
        rank = _rank_memory(config, inputs, "trainer rank", trainer_state_bytes(config, inputs), inputs.trained)
        roles += [replace(rank, resident=rank.resident + heads)] * config.trainer.ranks
        if config.objective.has_critic:
            critic, every = critic_state_bytes(config, inputs), student.parameters
            roles += [_rank_memory(config, inputs, "critic rank", critic, every)] * config.trainer.ranks
    return roles


def _rank_memory(config: PipelineConfig, inputs: Inputs, name: str, state: int, trained: int) -> GpuRole:
    """A rank of an engine whose ranks hold `state` bytes together, and train so many weights."""
    ranks, summed = config.trainer.ranks, summed_bytes(config, trained)
    # Gradients are copied to be added up, and converted to float32 for the optimiser.
    copied = max(summed, 4 * trained // ranks)
    return GpuRole(
        name=name,
        gpus=config.cluster.trainer_gpus,
        resident=state // ranks + summed,
        passing=gathered_bytes(config, inputs) + max(micro_batch_bytes(config, inputs), copied),
    )


def _teacher_memory(config: PipelineConfig, inputs: Inputs) -> GpuRole:
    if isinstance(config.teachers, VLLMTeachers):
        weights, _ = scoring_bytes(config, inputs)
        return GpuRole(
            name="scoring engine",
            gpus=teacher_devices(config.cluster, config.teachers),
            share=config.teachers.gpu_memory_utilization,
            share_key="teachers.gpu_memory_utilization",
            least=weights // config.teachers.tensor_parallel_size,
        )
    resident, passing = scoring_gpu_bytes(config, inputs)
    return GpuRole(name="scoring worker", gpus=config.cluster.teacher_gpus, resident=resident, passing=passing)


def scoring_gpu_bytes(config: PipelineConfig, inputs: Inputs) -> tuple[int, int]:
    """(weights of teachers, activations of one pass) on the fullest GPU of a scoring worker of engine `transformers`."""
    weights, passing = scoring_bytes(config, inputs)
    teachers, gpus = config.teachers, config.cluster.teacher_gpus
    if not isinstance(teachers, TransformersTeachers):
        return weights, passing
    if teachers.device_map is None:
        sizes, adapters = teacher_sizes(config, inputs)
        return max(weights, min(teachers.gpu_memory, sum(sizes) + adapters)), passing
    largest = max((expert.info for expert in inputs.scorers.values()), key=lambda info: info.parameters)
    body = inputs.read_body(largest)
    # Layers are not cut: accelerate lets a GPU have a quarter more than the largest layer beyond its equal share.
    layer = max(body.largest, largest.parameters // body.blocks) * DTYPE_BYTES[teachers.dtype]
    equal = int(weights / gpus + 1.25 * layer) if gpus > 1 else weights
    most = max((size for device, size in teachers.max_memory.items() if isinstance(device, int)), default=weights)
    return min(weights, equal, most), passing


def place_roles(roles: Sequence[GpuRole]) -> list[list[GpuRole]]:
    """The roles on each GPU. A worker with several GPUs is on each of them."""
    shared: list[list[GpuRole]] = []
    whole_gpus: list[list[GpuRole]] = []
    for role in roles:
        if role.gpus >= 1:
            whole_gpus += [[role]] * round(role.gpus)
            continue
        # 1e-9: three fractions that add up to 1 are a little more in floating point.
        room = [gpu for gpu in shared if sum(r.gpus for r in gpu) + role.gpus <= 1 + 1e-9]
        if room:
            max(room, key=lambda gpu: sum(r.gpus for r in gpu)).append(role)
        else:
            shared.append([role])
    return [*shared, *whole_gpus]


def memory_phases(together: Sequence[GpuRole]) -> list[GpuPhase]:
    """Two phases: engines write, the others compute. One phase if no engine sleeps."""
    awake = any(role.sleeps for role in together)
    times = (True, False) if awake else (False,)
    return [GpuPhase(parts=tuple(_role_memory(role, writing=writing) for role in together)) for writing in times]


def _role_memory(role: GpuRole, *, writing: bool) -> tuple[str, int, float]:
    """One role's part of the GPU. While `writing`, engines that sleep are awake and other roles hold only what they keep."""
    if role.share:
        asleep = role.sleeps and not writing
        return (
            f"{role.name}, asleep" if asleep else f"{role.name} ({role.share_key})",
            ASLEEP if asleep else CONTEXT,
            0.0 if asleep else role.share * role.engines,
        )
    return (role.name, CONTEXT + role.resident + (0 if writing else role.passing), 0.0)


def _refuse_crowd(together: Sequence[GpuRole], size: int) -> None:
    """Raises: ConfigError with the sum if the roles do not fit."""
    for role in together:
        if role.share and role.least > role.share * size:
            raise ConfigError.at(
                role.share_key,
                found=f"{role.share:g} of {_format_gib(size)} GiB, and weights of {_format_gib(role.least)}",
                wanted="a share that holds the weights and a key-value cache",
                fix=f"raise {role.share_key}, or use a larger GPU",
            )
    worst = max(memory_phases(together), key=lambda phase: phase.total(size))
    if worst.total(size) > size:
        raise ConfigError.at(
            "GPU memory",
            found=f"about {_format_gib(worst.total(size))} GiB on a GPU with {_format_gib(size)}: {worst.describe(size)}",
            wanted="shares and needs that add up to what the GPU has",
            fix=_suggest_fix(together, worst, size),
        )


def _suggest_fix(together: Sequence[GpuRole], worst: GpuPhase, size: int) -> str:
    engines = [role for role in together if role.share]
    other_bytes = sum(nbytes for _, nbytes, _ in worst.parts)
    share_left = int(100 * (size - other_bytes) / size / max(1, sum(role.engines for role in engines))) / 100
    ways = []
    if engines and share_left * size > max(role.least for role in engines):
        ways.append(f"set {' and '.join(dict.fromkeys(role.share_key for role in engines))} to {share_left:g} or less")
    if any(role.may_sleep and not role.sleeps for role in engines):
        ways.append("set rollout.sleep to true")
    ways.append("lower trainer.micro_batch_tokens, objective.chunk or rollout.max_model_len")
    ways.append("give roles GPUs of their own")
    return "; or ".join(ways)


def gpu_sizes() -> list[int]:
    """Bytes of every GPU that this process may use."""
    return [gpu.nbytes for gpu in list_gpus()]


def _format_gib(nbytes: float) -> str:
    return f"{nbytes / GIB:.2f}"
