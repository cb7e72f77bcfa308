"""Estimate how much of a GPU each role of a merge takes, from shapes and shares alone, before anything starts.

    trainer rank      weights, gradients, AdamW, gathered weights, teachers' heads; and a micro-batch
    scoring worker    one teacher's weights, and one pass. Engine vllm: its share
    rollout engine    its whole share, even if it needs less; with rollout.sleep only while it writes. In a push its weights at least,
                      and what comes in

vLLM takes its share of the whole GPU no matter who else is on it, so where roles share a GPU, shares and needs must add up.
This is an upper estimate, like that of `pipelines/sizing/memory.py`. Workers are on the GPUs that `pipelines/gpu_sharing.py` deals to
them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from opd.cluster import LOCAL
from opd.config import PipelineConfig
from opd.config.devices import WorkerGpus, rollout_devices, teacher_devices, trainer_devices
from opd.config.drift import count_worker_engines
from opd.config.teachers import OpenAITeachers, Teachers, TransformersTeachers, VLLMTeachers
from opd.errors import ConfigError
from opd.settings.strict import DTYPE_BYTES
from opd.settings.user_objects import is_import_name
from pipelines.gpu_sharing import SharingRole, deal_workers
from pipelines.sizing.cache import engine_devices, has_cpu_cache, least_bytes, sequence_bytes
from pipelines.sizing.draft import draft_rank_bytes
from pipelines.sizing.machine import MachineFacts, gpu_sizes
from pipelines.sizing.memory import (
    critic_state_bytes,
    engine_weights,
    estimate_memory,
    format_gib,
    gathered_bytes,
    heads_bytes,
    offloaded_bytes,
    scores_bytes,
    scoring_bytes,
    sends_heads,
    summed_bytes,
    teacher_sizes,
    trainer_state_bytes,
)
from pipelines.sizing.micro_batch import micro_batch_bytes
from pipelines.sizing.models import MergeModels, divide_models
from pipelines.sizing.push_memory import receiving_bytes, sending_bytes
from pipelines.teacher_groups import engine_cluster

PhaseName = Literal["writing", "computing", "pushing"]
"""The time in which engines write, teachers score and the trainer trains, or new weights go to the engines."""
CONTEXT = 600 << 20
"""Memory that CUDA and its libraries take for a process before the first tensor."""
ASLEEP = 900 << 20
"""Memory that an engine holds while it sleeps: that of CUDA, and its CUDA graphs. 0.87 GiB were measured on an H200, for a tiny model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuRole:
    """The memory of one worker on its GPUs."""

    name: str
    gpus: WorkerGpus
    apart: bool = True
    """The same as in `SharingRole`."""
    resident: int = 0
    """Bytes that stay for the whole run, on the fullest of its GPUs."""
    passing: int = 0
    """Additional bytes on that GPU while the worker computes."""
    pushing: int = 0
    """Additional bytes on that GPU while new weights are pushed; of an engine they are outside its share."""
    share: float = 0.0
    """Share of the whole GPU that a vLLM engine takes, and within which all its memory lies; 0 for other workers."""
    share_key: str = ""
    """Key of the pipeline that sets the share."""
    engines: int = 1
    """Number of vLLM engines of the worker, each with such a share."""
    sleeps: bool = False
    """True if it holds its share only while the other workers do not compute."""
    weights: int = 0
    """Bytes of its share that an engine which sleeps takes for a push."""
    may_sleep: bool = False
    """True if `rollout.sleep` could make the worker sleep."""
    least: int = 0
    """Bytes that an engine needs to start."""
    least_of: str = "weights"
    """Contents of these bytes, for people."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuPhase:
    """The contents of one GPU at one time."""

    name: PhaseName
    parts: tuple[tuple[str, int, float], ...]
    """(name, bytes, share of the GPU in addition to these) of each part."""

    def total(self, size: int) -> int:
        """Return the bytes on a GPU of `size` bytes."""
        return sum(nbytes + round(share * size) for _, nbytes, share in self.parts)

    def describe(self, size: int | None = None) -> str:
        """Return the sum in words, in GiB; a share of a GPU of unknown size is shown as a share."""
        summands = []
        for name, nbytes, share in self.parts:
            if size:
                summands.append(f"{format_gib(nbytes + round(share * size))} {name}")
            else:
                summands.append(
                    f"{format_gib(nbytes)} GiB{f' and {share:g} of the GPU' if share else ''} for the {name}"
                )
        return " + ".join(summands)


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryRoom:
    """The bytes that are needed on one GPU, or in the machines' own memory, and those that are there."""

    what: str
    """Purpose of the memory, for people."""
    needed: float
    there: int

    @property
    def fits(self) -> bool:
        return self.needed <= self.there


def fits_machine(config: PipelineConfig, models: MergeModels, machine: MachineFacts) -> bool:
    """Return True if a machine has the memory and the GPUs that a merge needs. `opd merge` and `opd check` demand this, `opd plan` plans
    with it, and `opd init` aims at it. On a machine without GPUs only the memory counts.

    Raises: ModelError.
    """
    enough = not machine.gpus or count_gpus(config, models) <= len(machine.gpus)
    return enough and all(room.fits for room in memory_rooms(config, models, machine))


def count_gpus(config: PipelineConfig, models: MergeModels) -> int:
    """Return how many GPUs the roles need. Raises: ModelError."""
    return len(place_roles(gpu_roles(config, models)))


def memory_rooms(config: PipelineConfig, models: MergeModels, machine: MachineFacts) -> list[MemoryRoom]:
    """Return the needed and the existing memory: for the roles of each GPU, as if it were the smallest, and in the machine's own memory.

    Raises: ModelError.
    """
    gpus = place_roles(gpu_roles(config, models)) if machine.gpus else []
    rooms = [room for roles in gpus for room in _share_rooms(roles, min(machine.gpus))]
    rooms += [_gpu_room(roles, min(machine.gpus)) for roles in gpus]
    what = "all machines, beside their GPUs" if machine.gpus else "all machines"
    needed = sum(need.nbytes for need in estimate_memory(config, models))
    rooms.append(MemoryRoom(what=what, needed=needed, there=machine.memory))
    if has_cpu_cache(config):
        what, there = "rollout engine: its cache and the longest sequence", config.rollout.kv_cache_gib << 30
        rooms.append(MemoryRoom(what=what, needed=sequence_bytes(config, models), there=there))
    return list(dict.fromkeys(rooms))


def refuse_crowded_gpus(config: PipelineConfig, models: MergeModels, machine: MachineFacts | None = None) -> list[str]:
    """Check the memory of the GPUs of `machine`, by default of this one, and return sentences that the user should read although nothing
    is wrong.

    Raises: ConfigError with the sum if roles do not fit on the GPU that they share, or if there are too few GPUs.
    """
    roles = gpu_roles(config, models)
    if not roles:
        return []
    seen = gpu_sizes() if machine is None and config.cluster.address == LOCAL else []
    sizes = seen if machine is None else machine.gpus
    if machine is None and not sizes:
        reason = "this process sees no GPU" if config.cluster.address == LOCAL else "the GPUs are other machines'"
        roles_of_fullest_gpu = max(place_roles(roles), key=len)
        text = max((phase.describe() for phase in memory_phases(roles_of_fullest_gpu)), key=len)
        return [f"{reason}: whether a GPU has room for what it is given is not checked; on one there will be {text}"]
    placed = place_roles(roles)
    if len(placed) > len(sizes):
        raise ConfigError.at(
            "cluster",
            found=f"{len(roles)} workers that need {len(placed)} GPUs, and {len(sizes)} {'here' if machine is None else 'in the spec'}",
            wanted="a GPU, or a share of one, for every worker, and for each process of an engine",
            fix="let roles share GPUs: cluster.rollout_gpus 0.4, cluster.teacher_gpus 0.2 and cluster.trainer_gpus 0.4 put rank i, "
            "engine i and scorer i on GPU i; or have fewer workers (trainer.ranks, rollout.workers, teachers.workers)",
        )
    for together in placed:
        _refuse_crowded_gpu(together, min(sizes))
    return []


def refuse_idle_gpus(config: PipelineConfig) -> None:
    """Refuse more than one GPU for a process. `opd plan` takes such a pipeline, and plans for all of them.

    Raises: ConfigError.
    """
    gpus = config.cluster
    if not is_import_name(config.rollout.engine):  # a user's engine may use what it asks for
        _refuse_gpus("cluster.rollout_gpus", gpus.rollout_gpus, "a rollout engine", _wants_several("rollout"))
    for section in config.engines:
        _refuse_idle_teacher_gpus(engine_cluster(config, section).teacher_gpus, section)
    fix = "set it to 1, and trainer.ranks to the number of GPUs to train on"
    _refuse_gpus("cluster.trainer_gpus", gpus.trainer_gpus, "a trainer rank", fix)


def _refuse_idle_teacher_gpus(gpus: float, teachers: Teachers) -> None:
    """Refuse more than one GPU for a process of a teachers' engine. Raises: ConfigError."""
    if isinstance(teachers, VLLMTeachers):
        _refuse_gpus("cluster.teacher_gpus", gpus, "a scoring worker", _wants_several("teachers"))
    elif isinstance(teachers, TransformersTeachers) and teachers.device_map is None:
        fix = "set it to 1, and teachers.workers for more of them; or teachers.device_map to auto, which divides a teacher's layers"
        _refuse_gpus("cluster.teacher_gpus", gpus, "a scoring worker", fix)
    elif isinstance(teachers, OpenAITeachers):
        fix = "set it to 0, and teachers.workers for more of them: the teachers compute elsewhere"
        _refuse_gpus("cluster.teacher_gpus", gpus, "a scoring worker", fix)


def gpu_roles(config: PipelineConfig, models: MergeModels) -> list[GpuRole]:
    """Return the memory of every worker that has a GPU. Reads headers only. Raises: ModelError."""
    cluster, student, roles = config.cluster, models.student, []
    if cluster.rollout_gpus:
        engines = count_worker_engines(config.domains)
        engine = GpuRole(
            name="rollout engine" if engines == 1 else "rollout engine and the expert's that writes turns",
            gpus=rollout_devices(cluster, config.rollout),
            share=config.rollout.gpu_memory_utilization,
            share_key="rollout.gpu_memory_utilization",
            engines=engines,
            sleeps=config.rollout.sleep,
            weights=engines * engine_weights(config, models) // engine_devices(config),
            pushing=receiving_bytes(config, models, engine_devices(config)),
            may_sleep=engines == 1 and config.schedule.mode == "sync",
            least=least_bytes(config, models),
            least_of="weights, activations and the longest sequence",
        )
        roles += [engine] * config.rollout.workers
    for number, (engine_config, part) in enumerate(divide_models(config, models)):
        if engine_config.cluster.teacher_gpus and not engine_config.teachers.elsewhere:
            role = _teacher_memory(engine_config, part)
            role = replace(role, name=f"{role.name} of engine {number}") if number else role
            roles += [role] * engine_config.teachers.scoring_workers
    if cluster.trainer_gpus:
        heads = heads_bytes(config, models) if sends_heads(config) else 0
        state = trainer_state_bytes(config, models) - offloaded_bytes(config, models)
        rank = _rank_memory(config, models, "trainer rank", state, models.trained)
        scores = scores_bytes(config, models)
        pushing = sending_bytes(config, models)
        draft, guessed = draft_rank_bytes(config, student.vocab_size)
        rank = replace(
            rank, resident=rank.resident + heads + draft, passing=rank.passing + scores + guessed, pushing=pushing
        )
        roles += [rank] * config.trainer.ranks
        for name in config.objective.judging_models:
            critic, parameters = critic_state_bytes(config, models), student.parameters
            roles += [_rank_memory(config, models, f"{name} rank", critic, parameters)] * config.trainer.ranks
    return roles


def _rank_memory(config: PipelineConfig, models: MergeModels, name: str, state: int, trained: int) -> GpuRole:
    """Return the memory of one rank of an engine whose ranks together hold `state` bytes and train `trained` weights."""
    ranks, summed = config.trainer.ranks, summed_bytes(config, trained)
    # Gradients are copied to be added up, and later converted to float32 for the optimiser.
    copied = max(summed, 4 * trained // ranks)
    return GpuRole(
        name=name,
        gpus=trainer_devices(config.cluster),
        resident=state // ranks + summed,
        passing=gathered_bytes(config, models) + max(micro_batch_bytes(config, models), copied),
    )


def _teacher_memory(config: PipelineConfig, models: MergeModels) -> GpuRole:
    """Return the memory of one scoring worker with GPUs."""
    gpus = teacher_devices(config.cluster, config.teachers)
    if isinstance(config.teachers, VLLMTeachers):
        weights, _ = scoring_bytes(config, models)
        return GpuRole(
            name="scoring engine",
            gpus=gpus,
            apart=False,
            share=config.teachers.gpu_memory_utilization,
            share_key="teachers.gpu_memory_utilization",
            least=weights // config.teachers.tensor_parallel_size,
        )
    resident, passing = scoring_gpu_bytes(config, models)
    return GpuRole(name="scoring worker", gpus=gpus, apart=False, resident=resident, passing=passing)


def scoring_gpu_bytes(config: PipelineConfig, models: MergeModels) -> tuple[int, int]:
    """Return (weights of teachers, activations of one pass) on the fullest GPU of a scoring worker of engine `transformers`."""
    weights, passing = scoring_bytes(config, models)
    teachers, gpus = config.teachers, config.cluster.teacher_gpus
    if not isinstance(teachers, TransformersTeachers):
        return weights, passing
    if teachers.device_map is None:
        sizes, adapters = teacher_sizes(config, models)
        return max(weights, min(teachers.gpu_memory, sum(sizes) + adapters)), passing
    largest = max((expert.info for expert in models.scorers.values()), key=lambda info: info.parameters)
    body = models.read_body(largest)
    # Layers are not cut: accelerate lets a GPU have a quarter more than the largest layer beyond its equal share.
    layer = max(body.largest, largest.parameters // body.blocks) * DTYPE_BYTES[teachers.dtype]
    equal = int(weights / gpus + 1.25 * layer) if gpus > 1 else weights
    most = max((size for device, size in teachers.max_memory.items() if isinstance(device, int)), default=weights)
    return min(weights, equal, most), passing


def place_roles(roles: Sequence[GpuRole]) -> list[list[GpuRole]]:
    """Return for each GPU the roles of the workers on it: first the GPUs that roles share. A worker with several GPUs is on each of them."""
    sharing = {role.name: role for role in roles if role.gpus.is_shared}
    counts = Counter(role.name for role in roles)
    dealt = deal_workers(
        [
            SharingRole(name=name, workers=counts[name], gpus=role.gpus, apart=role.apart)
            for name, role in sharing.items()
        ]
    )
    shared = [
        [role for name, role in sharing.items() for worker in workers if worker.role == name] for workers in dealt
    ]
    return [*shared, *([role] for role in roles if not role.gpus.is_shared for _ in range(role.gpus.count))]


def memory_phases(together: Sequence[GpuRole]) -> list[GpuPhase]:
    """Return the phases of a GPU with these roles: engines write, then the others compute, then new weights are pushed. Without an engine
    that sleeps the first two are one, and without roles that exchange weights there is no third."""
    phases: list[PhaseName] = ["writing"] if any(role.sleeps for role in together) else []
    phases += ["computing", "pushing"] if any(role.pushing for role in together) else ["computing"]
    return [GpuPhase(name=phase, parts=tuple(_role_memory(role, phase) for role in together)) for phase in phases]


def _role_memory(role: GpuRole, phase: PhaseName) -> tuple[str, int, float]:
    """Return (name, bytes, share of the GPU) of one role. An engine that can sleep is awake while it writes, and takes its weights alone
    for a push. All other roles hold what stays for the whole run, and more only in the phase that needs it."""
    if not role.share:
        passing = {"writing": 0, "computing": role.passing, "pushing": role.pushing}[phase]
        return (role.name, CONTEXT + role.resident + passing, 0.0)
    taken = role.pushing if phase == "pushing" else 0
    if not role.sleeps or phase == "writing":
        return (f"{role.name} ({role.share_key})", CONTEXT + taken, role.share * role.engines)
    if phase == "pushing":
        return (f"{role.name} that takes new weights", ASLEEP + role.weights + taken, 0.0)
    return (f"{role.name}, asleep", ASLEEP, 0.0)


def _share_rooms(together: Sequence[GpuRole], size: int) -> list[MemoryRoom]:
    """Return for each engine the bytes that it needs to start, and those of its share of a GPU of `size` bytes. CUDA's own memory is
    not in the share."""
    return [
        MemoryRoom(
            what=f"{role.name}: its share and its {role.least_of}", needed=role.least, there=round(role.share * size)
        )
        for role in together
        if role.share
    ]


def _gpu_room(together: Sequence[GpuRole], size: int) -> MemoryRoom:
    """Return the memory of all roles on one GPU of `size` bytes, in the phase that needs most."""
    worst = _fullest_phase(together, size)
    return MemoryRoom(what=" + ".join(name for name, _, _ in worst.parts), needed=worst.total(size), there=size)


def _fullest_phase(together: Sequence[GpuRole], size: int) -> GpuPhase:
    return max(memory_phases(together), key=lambda phase: phase.total(size))


def _refuse_crowded_gpu(together: Sequence[GpuRole], size: int) -> None:
    """Raises: ConfigError with the sum if these roles do not fit together on a GPU of `size` bytes."""
    engines = [role for role in together if role.share]
    for role, room in zip(engines, _share_rooms(engines, size), strict=True):
        if not room.fits:
            raise ConfigError.at(
                role.share_key,
                found=f"{role.share:g} of {format_gib(size)} GiB, and {role.least_of} of {format_gib(role.least)}",
                wanted="a share that holds the weights and a key-value cache",
                fix=f"raise {role.share_key}, or use a larger GPU",
            )
    room = _gpu_room(together, size)
    if not room.fits:
        worst = _fullest_phase(together, size)
        raise ConfigError.at(
            "GPU memory",
            found=f"about {format_gib(room.needed)} GiB on a GPU with {format_gib(size)}: {worst.describe(size)}",
            wanted="shares and needs that add up to what the GPU has",
            fix=_suggest_fix(together, worst, size),
        )


def _suggest_fix(together: Sequence[GpuRole], worst: GpuPhase, size: int) -> str:
    """Return ways to make the roles fit, in words."""
    engines = [role for role in together if role.share]
    other_bytes = sum(nbytes for _, nbytes, _ in worst.parts)
    share_left = int(100 * (size - other_bytes) / size / max(1, sum(role.engines for role in engines))) / 100
    ways = []
    if engines and share_left * size > max(role.least for role in engines):
        ways.append(f"set {' and '.join(dict.fromkeys(role.share_key for role in engines))} to {share_left:g} or less")
    if any(role.may_sleep and not role.sleeps for role in engines):
        ways.append("set rollout.sleep to true")
    if worst.name == "pushing":
        ways.append("set sync.kind to network if it is direct: its buffers are in the machine's memory")
    else:
        ways.append("lower trainer.micro_batch_tokens, objective.chunk or rollout.max_model_len")
    ways.append("give roles GPUs of their own")
    return "; or ".join(ways)


def _wants_several(section: str) -> str:
    return f"set it to 1, and {section}.tensor_parallel_size to the number of GPUs that each engine is to have"


def _refuse_gpus(key: str, gpus: float, owner: str, fix: str) -> None:
    if gpus > 1:
        limit = f"at most 1: {owner} of one process computes on one GPU, and the others would be reserved for nobody"
        raise ConfigError.at(key, found=f"{gpus:g}", wanted=limit, fix=fix)
