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
from opd.config.drift import engines_of_worker
from opd.config.teachers import TransformersTeachers, VLLMTeachers
from opd.errors import ConfigError
from opd.payloads import answer_class
from opd.settings.strict import DTYPE_BYTES
from pipelines.inputs.gpus import gpus_here
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
class Role:
    """One worker on a GPU."""

    what: str
    gpus: float
    """GPUs that Ray hands out to the worker, or a share of one."""
    kept: int = 0
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
class Phase:
    """The contents of one GPU at one time."""

    parts: tuple[tuple[str, int, float], ...]
    """(name, bytes, share of the GPU) of each part."""

    def total(self, size: int) -> int:
        return sum(nbytes + round(share * size) for _, nbytes, share in self.parts)

    def shown(self, size: int | None = None) -> str:
        """The sum in words, in GiB; a share of a GPU of unknown size is shown as a share."""
        words = []
        for what, nbytes, share in self.parts:
            if size:
                words.append(f"{_gib(nbytes + round(share * size))} {what}")
            else:
                words.append(f"{_gib(nbytes)} GiB{f' and {share:g} of the GPU' if share else ''} for the {what}")
        return " + ".join(words)


def refuse_crowded_gpus(config: PipelineConfig, inputs: Inputs) -> list[str]:
    """Check GPU memory; returns what the user should know although nothing is wrong.

    Raises: ConfigError with the sum if roles do not fit on the GPU that they share, or if there are too few GPUs.
    """
    wanted = gpu_roles(config, inputs)
    if not wanted:
        return []
    sizes = gpu_sizes() if config.cluster.address == LOCAL else []
    if not sizes:
        where = "this process sees no GPU" if config.cluster.address == LOCAL else "the GPUs are other machines'"
        crowded = max(place_roles(wanted), key=len)
        text = max((phase.shown() for phase in memory_phases(crowded)), key=len)
        return [f"{where}: whether a GPU has room for what it is given is not checked; on one there will be {text}"]
    placed = place_roles(wanted)
    if len(placed) > len(sizes):
        raise ConfigError.at(
            "cluster",
            found=f"{len(wanted)} workers that need {len(placed)} GPUs, and {len(sizes)} here",
            wanted="a GPU, or a part of one, for every worker, and for each process of an engine",
            fix="give fractions, such as cluster.rollout_gpus 0.4, or fewer workers (trainer.ranks, rollout.workers, "
            "teachers.workers)",
        )
    for together in placed:
        _refuse_crowd(together, min(sizes))
    return []


def gpu_roles(config: PipelineConfig, inputs: Inputs) -> list[Role]:
    """Every worker on a GPU. Reads headers only. Raises: ModelError."""
    cluster, student, found = config.cluster, inputs.student, []
    if cluster.rollout_gpus:
        engines = engines_of_worker(config.domains)
        engine = Role(
            what="rollout engine" if engines == 1 else "rollout engine and the expert's that writes turns",
            gpus=rollout_devices(cluster, config.rollout),
            share=config.rollout.gpu_memory_utilization,
            share_key="rollout.gpu_memory_utilization",
            engines=engines,
            sleeps=config.rollout.sleep,
            may_sleep=engines == 1 and config.schedule.mode == "sync",
            least=student.parameters * DTYPE_BYTES[config.rollout.dtype] // config.rollout.tensor_parallel_size,
        )
        found += [engine] * config.rollout.workers
    if cluster.teacher_gpus and not config.teachers.elsewhere:
        found += [_teacher_memory(config, inputs)] * config.teachers.scoring_workers
    if cluster.trainer_gpus:
        heads = heads_bytes(config, inputs) if answer_class(config.teachers.payload).SENDS_HEADS else 0
        rank = _rank_memory(config, inputs, "trainer rank", trainer_state_bytes(config, inputs), inputs.trained)
        found += [replace(rank, kept=rank.kept + heads)] * config.trainer.ranks
        if config.objective.has_critic:
            critic, every = critic_state_bytes(config, inputs), student.parameters
            found += [_rank_memory(config, inputs, "critic rank", critic, every)] * config.trainer.ranks
    return found


def _rank_memory(config: PipelineConfig, inputs: Inputs, what: str, state: int, trained: int) -> Role:
    """A rank of an engine whose ranks hold `state` bytes together, and train so many weights."""
    ranks, summed = config.trainer.ranks, summed_bytes(config, trained)
    # Gradients are copied to be added up, and converted to float32 for the optimiser.
    copied = max(summed, 4 * trained // ranks)
    return Role(
        what=what,
        gpus=config.cluster.trainer_gpus,
        kept=state // ranks + summed,
        passing=gathered_bytes(config, inputs) + max(micro_batch_bytes(config, inputs), copied),
    )


def _teacher_memory(config: PipelineConfig, inputs: Inputs) -> Role:
    if isinstance(config.teachers, VLLMTeachers):
        weights, _ = scoring_bytes(config, inputs)
        return Role(
            what="scoring engine",
            gpus=teacher_devices(config.cluster, config.teachers),
            share=config.teachers.gpu_memory_utilization,
            share_key="teachers.gpu_memory_utilization",
            least=weights // config.teachers.tensor_parallel_size,
        )
    kept, passing = scoring_gpu_bytes(config, inputs)
    return Role(what="scoring worker", gpus=config.cluster.teacher_gpus, kept=kept, passing=passing)


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


def place_roles(wanted: Sequence[Role]) -> list[list[Role]]:
    """The roles on each GPU. A worker with several GPUs is on each of them."""
    shared: list[list[Role]] = []
    whole: list[list[Role]] = []
    for role in wanted:
        if role.gpus >= 1:
            whole += [[role]] * round(role.gpus)
            continue
        # 1e-9: three fractions that add up to 1 are a little more in floating point.
        room = [gpu for gpu in shared if sum(r.gpus for r in gpu) + role.gpus <= 1 + 1e-9]
        if room:
            max(room, key=lambda gpu: sum(r.gpus for r in gpu)).append(role)
        else:
            shared.append([role])
    return [*shared, *whole]


def memory_phases(together: Sequence[Role]) -> list[Phase]:
    """Two phases: engines write, the others compute. One phase if no engine sleeps."""
    awake = any(role.sleeps for role in together)
    times = (True, False) if awake else (False,)
    return [Phase(parts=tuple(_role_memory(role, writing=writing) for role in together)) for writing in times]


def _role_memory(role: Role, *, writing: bool) -> tuple[str, int, float]:
    """One role's part of the GPU. While `writing`, engines that sleep are awake and other roles hold only what they keep."""
    if role.share:
        asleep = role.sleeps and not writing
        return (
            f"{role.what}, asleep" if asleep else f"{role.what} ({role.share_key})",
            ASLEEP if asleep else CONTEXT,
            0.0 if asleep else role.share * role.engines,
        )
    return (role.what, CONTEXT + role.kept + (0 if writing else role.passing), 0.0)


def _refuse_crowd(together: Sequence[Role], size: int) -> None:
    """Raises: ConfigError with the sum if the roles do not fit."""
    for role in together:
        if role.share and role.least > role.share * size:
            raise ConfigError.at(
                role.share_key,
                found=f"{role.share:g} of {_gib(size)} GiB, and weights of {_gib(role.least)}",
                wanted="a share that holds the weights and a key-value cache",
                fix=f"raise {role.share_key}, or use a larger GPU",
            )
    worst = max(memory_phases(together), key=lambda phase: phase.total(size))
    if worst.total(size) > size:
        raise ConfigError.at(
            "GPU memory",
            found=f"about {_gib(worst.total(size))} GiB on a GPU with {_gib(size)}: {worst.shown(size)}",
            wanted="shares and needs that add up to what the GPU has",
            fix=_suggest_fix(together, worst, size),
        )


def _suggest_fix(together: Sequence[Role], worst: Phase, size: int) -> str:
    engines = [role for role in together if role.share]
    others = sum(nbytes for _, nbytes, _ in worst.parts)
    left = int(100 * (size - others) / size / max(1, sum(role.engines for role in engines))) / 100
    ways = []
    if engines and left * size > max(role.least for role in engines):
        ways.append(f"set {' and '.join(dict.fromkeys(role.share_key for role in engines))} to {left:g} or less")
    if any(role.may_sleep and not role.sleeps for role in engines):
        ways.append("set rollout.sleep to true")
    ways.append("lower trainer.micro_batch_tokens, objective.chunk or rollout.max_model_len")
    ways.append("give roles GPUs of their own")
    return "; or ".join(ways)


def gpu_sizes() -> list[int]:
    """Bytes of every GPU that this process may use."""
    return [gpu.nbytes for gpu in gpus_here()]


def _gib(nbytes: float) -> str:
    return f"{nbytes / GIB:.2f}"
