"""The GPUs that each worker of a role has, and checks that the role can do its work on them."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil
from typing import Literal

from pydantic_core import PydanticCustomError

from opd.config.sections import ClusterConfig, RolloutConfig, ScheduleConfig, SyncConfig, TrainerConfig
from opd.config.teachers import Teachers, TransformersTeachers, VLLMTeachers
from opd.settings.user_objects import is_import_name

PushKind = Literal["shared_memory", "network", "direct"]


def choose_push_kind(sync: SyncConfig, cluster: ClusterConfig, rollout: RolloutConfig) -> PushKind:
    """Return the way of new weights that `sync.kind` asks for. `auto` is `direct` if trainer and engines are on GPUs, else `shared_memory`.

    A divided engine speaks NCCL through loopback alone, so on a cluster of several machines it may not be reached directly; a user's own
    engine may have no direct way.
    """
    if sync.kind != "auto":
        return sync.kind
    on_gpus = cluster.rollout_gpus > 0 and cluster.trainer_gpus > 0
    is_reached = cluster.address == "local" or rollout.tensor_parallel_size == 1
    return "direct" if on_gpus and is_reached and rollout.engine == "vllm" else "shared_memory"


def find_push_problem(sync: SyncConfig, cluster: ClusterConfig) -> PydanticCustomError | None:
    """Return why weights cannot go directly from the trainer to the engines; None if they can, or need not."""
    if sync.kind != "direct" or (cluster.rollout_gpus > 0) == (cluster.trainer_gpus > 0):
        return None
    return _devices_error(
        "sync.kind",
        f"direct with cluster.rollout_gpus {cluster.rollout_gpus:g} and cluster.trainer_gpus {cluster.trainer_gpus:g}",
        "shared_memory or network: between a GPU and a CPU nothing goes directly; or set both cluster.*_gpus",
    )


@dataclass(frozen=True, slots=True)
class WorkerGpus:
    """The GPUs of one worker."""

    count: int
    """Number of GPUs that it computes on; 0: the CPU."""
    share: float = 1.0
    """Share of each of them; less than 1: workers of other roles are on the same GPUs."""

    @property
    def is_shared(self) -> bool:
        return self.count > 0 and self.share < 1


def rollout_devices(cluster: ClusterConfig, rollout: RolloutConfig) -> WorkerGpus:
    """Return the GPUs of one rollout engine."""
    return _count_devices(cluster.rollout_gpus, rollout.tensor_parallel_size)


def teacher_devices(cluster: ClusterConfig, teachers: Teachers) -> WorkerGpus:
    """Return the GPUs of one scoring worker."""
    return _count_devices(
        cluster.teacher_gpus, teachers.tensor_parallel_size if isinstance(teachers, VLLMTeachers) else 1
    )


def trainer_devices(cluster: ClusterConfig) -> WorkerGpus:
    """Return the GPUs of one rank of the trainer or of the critic."""
    return _count_devices(cluster.trainer_gpus, 1)


def _count_devices(gpus: float, processes: int) -> WorkerGpus:
    return WorkerGpus(processes, gpus) if 0 < gpus < 1 else WorkerGpus(ceil(gpus) * processes)


def find_devices_problem(
    cluster: ClusterConfig, trainer: TrainerConfig, rollout: RolloutConfig, teachers: Teachers, schedule: ScheduleConfig
) -> PydanticCustomError | None:
    """Return the first thing that a role cannot do on its devices; None if all can."""
    problem = _find_division_problem("rollout", cluster.rollout_gpus, rollout.tensor_parallel_size)
    if problem is None and isinstance(teachers, VLLMTeachers):
        problem = _find_division_problem("teacher", cluster.teacher_gpus, teachers.tensor_parallel_size)
    if problem is None and isinstance(teachers, TransformersTeachers) and teachers.device_map is not None:
        problem = _find_map_problem(cluster.teacher_gpus, teachers)
    return (
        problem
        or _find_gpu_memory_problem(cluster, teachers)
        or _find_engine_problem(cluster, rollout, schedule)
        or _find_sharing_problem(cluster, trainer, rollout, teachers)
    )


def _find_sharing_problem(
    cluster: ClusterConfig, trainer: TrainerConfig, rollout: RolloutConfig, teachers: Teachers
) -> PydanticCustomError | None:
    """Return why roles cannot share GPUs as their shares and placements say; None if they can."""
    if is_import_name(rollout.engine) and 0 < cluster.rollout_gpus < 1 and 0 < cluster.trainer_gpus < 1 < trainer.ranks:
        return _devices_error(
            "cluster.rollout_gpus",
            f"{cluster.rollout_gpus:g} with rollout.engine {rollout.engine} and trainer.ranks {trainer.ranks}",
            "a whole number: `opd` does not know the workers of this engine, so it cannot give each the GPU of a rank",
        )
    placement = cluster.placement
    devices = {
        "trainer": (trainer_devices(cluster), placement.trainer),
        "rollout": (rollout_devices(cluster, rollout), placement.rollout),
        "teachers": (teacher_devices(cluster, teachers), placement.teachers),
    }
    sharing = {name: (gpus, where) for name, (gpus, where) in devices.items() if gpus.is_shared}
    for name, (_, where) in sharing.items():
        first, (_, first_where) = next(iter(sharing.items()))
        if (where.strategy, where.label_selector) != (first_where.strategy, first_where.label_selector):
            return _devices_error(
                f"cluster.placement.{name}",
                f"strategy {where.strategy} and label_selector {where.label_selector}",
                f"those of cluster.placement.{first}, {first_where.strategy} and {first_where.label_selector}: both roles have a "
                "share of a GPU (cluster.*_gpus below 1), so they are on the same ones",
            )
        if "spread" in where.strategy and any(gpus.count > 1 for gpus, _ in sharing.values()):
            return _devices_error(
                f"cluster.placement.{name}.strategy",
                f"{where.strategy} with an engine of several processes on shared GPUs",
                "pack or strict_pack: all GPUs of an engine are on one node",
            )
    return None


def _find_gpu_memory_problem(cluster: ClusterConfig, teachers: Teachers) -> PydanticCustomError | None:
    """Return why `teachers.gpu_memory` has no effect; None if it has one, or is not set."""
    if not isinstance(teachers, TransformersTeachers) or not teachers.gpu_memory or cluster.teacher_gpus:
        return None
    expected = "0: on a CPU teachers.memory keeps weights where they are used; set cluster.teacher_gpus if the workers have GPUs"
    return _devices_error("teachers.gpu_memory", f"{teachers.gpu_memory} bytes with cluster.teacher_gpus 0", expected)


def _find_division_problem(role: str, gpus: float, size: int) -> PydanticCustomError | None:
    """Return why an engine of `size` processes cannot have `gpus` GPUs for each process; None if it can."""
    if size == 1 or gpus <= 1:
        return None
    section = "teachers" if role == "teacher" else role
    return _devices_error(
        f"cluster.{role}_gpus",
        f"{gpus:g} with {section}.tensor_parallel_size {size}",
        "at most 1: it counts the GPUs of each of an engine's processes, which computes on one",
    )


def _find_map_problem(gpus: float, teachers: TransformersTeachers) -> PydanticCustomError | None:
    """Return why `teachers.device_map` and `max_memory` do not fit a worker with `gpus` GPUs; None if they do."""
    with_gpus = f"with cluster.teacher_gpus {gpus:g}"
    if gpus > 1 and gpus % 1:
        expected = "a whole number: layers are divided among whole GPUs"
        return _devices_error(
            "cluster.teacher_gpus", f"{gpus:g} with teachers.device_map {teachers.device_map}", expected
        )
    if gpus % 1 and not teachers.max_memory:
        expected = "the most bytes on GPU 0, and on cpu and disk: others on this GPU need memory too, a fraction does not say how much"
        return _devices_error("teachers.max_memory", f"nothing, {with_gpus}", expected)
    named_gpus = {device for device in teachers.max_memory if isinstance(device, int)}
    worker_gpus = set(range(ceil(gpus)))
    if named_gpus - worker_gpus:
        worker_devices = (
            f"the GPUs of a scoring worker, {_format_numbers(worker_gpus)}"
            if worker_gpus
            else "cpu and disk: a scoring worker has no GPU"
        )
        expected = f"{worker_devices}; cluster.teacher_gpus gives it more"
        return _devices_error(
            "teachers.max_memory", f"GPU {_format_numbers(named_gpus - worker_gpus)}, {with_gpus}", expected
        )
    if teachers.max_memory and worker_gpus - named_gpus:
        expected = f"all GPUs of a scoring worker, {_format_numbers(worker_gpus)}: one that is not named would be reserved for nobody"
        return _devices_error(
            "teachers.max_memory", f"no GPU {_format_numbers(worker_gpus - named_gpus)}, {with_gpus}", expected
        )
    return None


def _format_numbers(gpus: set[int]) -> str:
    return ", ".join(map(str, sorted(gpus)))


def _find_engine_problem(
    cluster: ClusterConfig, rollout: RolloutConfig, schedule: ScheduleConfig
) -> PydanticCustomError | None:
    if rollout.sleep and not cluster.rollout_gpus:
        return _devices_error(
            "rollout.sleep",
            "true with cluster.rollout_gpus 0",
            "false: a CPU engine cannot give its memory back; set cluster.rollout_gpus if the engines have GPUs",
        )
    if rollout.sleep and schedule.mode == "one_step_off":
        return _devices_error(
            "rollout.sleep",
            "true with schedule.mode one_step_off",
            "false with schedule.mode one_step_off: the engine writes while the trainer trains, so they cannot take turns with "
            "a GPU's memory; set schedule.mode to sync to share it",
        )
    if rollout.kv_cache_dtype != "auto" and not cluster.rollout_gpus:
        return _devices_error(
            "rollout.kv_cache_dtype",
            f"{rollout.kv_cache_dtype} with cluster.rollout_gpus 0",
            "auto: a CPU engine has memory for its cache, and would only write from a distribution that is not the student's",
        )
    return None


def _devices_error(key: str, actual: str, expected: str) -> PydanticCustomError:
    return PydanticCustomError("devices", "{wanted}", {"wanted": expected, "where": key, "found": actual})
