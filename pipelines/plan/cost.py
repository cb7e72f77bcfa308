"""Seconds by what they are spent on, and the hardware of each role: how many workers it has, and what each of them can do."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import ceil, floor
from typing import Any, Self

from opd.cluster import LOCAL
from opd.config import PipelineConfig
from opd.config.devices import WorkerGpus, rollout_devices, teacher_devices, trainer_devices
from opd.config.teachers import TransformersTeachers, VLLMTeachers
from opd.settings.strict import DType
from opd.settings.yaml_files import validate_section
from pipelines.cores import roles_at_once
from pipelines.plan.spec import ClusterSpec
from pipelines.sizing.shrink import Data, apply_change


@dataclass(frozen=True, slots=True, kw_only=True)
class Seconds:
    """Time of one worker or phase, by what it waits for."""

    compute: float = 0.0
    """Matrix products."""
    memory: float = 0.0
    """Bytes read and written in the device's own memory."""
    link: float = 0.0
    """Bytes between devices, machines, host and storage."""
    overhead: float = 0.0
    """All else: calls, scheduling, Python."""

    @property
    def total(self) -> float:
        return self.compute + self.memory + self.link + self.overhead

    @property
    def on_device(self) -> float:
        """Seconds in which the device itself is busy, so that no other role has it."""
        return self.compute + self.memory

    def __add__(self, other: Seconds) -> Seconds:
        return Seconds(
            compute=self.compute + other.compute,
            memory=self.memory + other.memory,
            link=self.link + other.link,
            overhead=self.overhead + other.overhead,
        )

    def times(self, factor: float) -> Seconds:
        """Return each part multiplied by a factor."""
        return Seconds(
            compute=factor * self.compute,
            memory=factor * self.memory,
            link=factor * self.link,
            overhead=factor * self.overhead,
        )

    def parts(self) -> dict[str, float]:
        """Return the seconds of each part, by name."""
        return {name: getattr(self, name) for name in ("compute", "memory", "link", "overhead")}

    @property
    def limit(self) -> str:
        """Name of the largest part."""
        parts = self.parts()
        return max(parts, key=lambda name: parts[name])


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerHardware:
    """The hardware under the workers of one role."""

    spec: ClusterSpec
    workers: int
    devices: float
    """Devices with which each worker computes while it is at work: several, one, or a share of one that it has with others of its role."""
    in_turn: bool = False
    """True if a worker's devices hold different layers of its model, so that one of them computes at a time."""

    @property
    def at_work(self) -> float:
        """Devices of a worker that compute at a time."""
        return min(1.0, self.devices) if self.in_turn else self.devices

    @property
    def share_of_devices(self) -> float:
        """Share of the cluster's devices that the role's workers use while they are at work."""
        return self.workers * self.devices / self.spec.devices

    @property
    def machines(self) -> int:
        """Number of machines that the role's workers are on."""
        return max(1, min(self.spec.machines, ceil(self.workers * self.devices / max(1, self.spec.machine.gpus))))

    @property
    def slowdown(self) -> float:
        """Factor by which overheads take longer because workers share cores; 1 with GPUs, or with a core for each worker."""
        if self.spec.machine.gpus:
            return 1.0
        return max(1.0, self.workers / (self.spec.machines * self.spec.machine.cores))

    def matmul_seconds(self, flops: float, dtype: DType, share: float) -> float:
        """Return the seconds of `flops` FLOPs in one worker, which reaches `share` of the rate."""
        return flops / (self.spec.rates.flops(dtype) * self.at_work * share)

    def copy_seconds(self, nbytes: float) -> float:
        """Return the seconds in which one worker reads or writes `nbytes` in its memory."""
        return nbytes / (self.spec.rates.memory * self.at_work * self.spec.factors.memory.share)

    def first_touch_seconds(self, nbytes: float) -> float:
        """Return the additional seconds of writing `nbytes` to memory that the system has only just given to the worker's process."""
        fresh, touched = self.spec.rates.fresh, self.spec.rates.memory
        if self.spec.machine.gpus or fresh is None:
            return 0.0
        return max(0.0, nbytes / fresh - nbytes / touched) / self.at_work

    def collective_seconds(self, nbytes: float, members: float) -> float:
        """Return the seconds until each of `members` devices has all `nbytes`, which were divided among them (a gather), or the
        sum of its part of them (a reduce-scatter). An all-reduce is one after the other.

        A ring passes (members - 1) / members of the bytes through each link. Between machines all links of a machine share in this.
        """
        if members <= 1:
            return 0.0
        gpus = max(1, self.spec.machine.gpus)
        inside, between = self.spec.links.inside, self.spec.links.between * gpus
        rate = inside if members <= gpus else min(inside, between)
        return nbytes * (members - 1) / members / (rate * self.spec.factors.link.share)


@dataclass(frozen=True, slots=True, kw_only=True)
class Hardware:
    """The hardware under all roles."""

    rollout: WorkerHardware
    teachers: WorkerHardware
    trainer: WorkerHardware
    shared: bool
    """True if the roles take turns on the same devices."""
    slowdown: float = 1.0
    """Factor by which the engines, and the role that works beside them, take longer while both are at work. It is more than 1 if there
    are more threads than cores."""

    @classmethod
    def from_config(cls, config: PipelineConfig, spec: ClusterSpec) -> Self:
        """Return the hardware under the workers of a pipeline to which `apply_placement` has applied the spec's placement."""
        cluster, on_gpus = config.cluster, spec.machine.gpus > 0
        scorers = sum(section.scoring_workers for section in config.engines)
        workers = (config.rollout.workers, max(1, scorers), config.trainer.ranks)
        engine, scorer = rollout_devices(cluster, config.rollout), teacher_devices(cluster, config.teachers)
        gpus = (engine, scorer, trainer_devices(cluster))
        roles = 1 if on_gpus else roles_at_once(config)
        rollout, teachers, trainer = (
            WorkerHardware(
                spec=spec,
                workers=n,
                devices=_worker_gpus(spec, n, worker_gpus) if on_gpus else _worker_cores(spec, n, roles),
            )
            for n, worker_gpus in zip(workers, gpus, strict=True)
        )
        teachers = replace(teachers, in_turn=isinstance(config.teachers, TransformersTeachers))
        shared = not on_gpus or any(worker_gpus.is_shared for worker_gpus in gpus)
        hardware = cls(rollout=rollout, teachers=teachers, trainer=trainer, shared=shared)
        if roles == 1:
            return hardware
        # The engines work beside scoring or beside training, of which the larger share counts.
        together = rollout.share_of_devices + max(teachers.share_of_devices, trainer.share_of_devices)
        return replace(hardware, slowdown=max(1.0, together))


def _worker_gpus(spec: ClusterSpec, workers: int, gpus: WorkerGpus) -> float:
    """Return the GPUs with which one of a role's workers computes. While roles take turns, each has all of its GPUs, and shares them only
    with other workers of its own. A role without GPUs is planned as if each worker had one."""
    count = max(1, gpus.count)
    return count / max(1, ceil(workers * count / spec.devices)) if gpus.is_shared else count


def _worker_cores(spec: ClusterSpec, workers: int, roles: int) -> float:
    """Return the share of a machine's cores with which one of a role's workers computes while `roles` roles are at work: its
    threads, as `opd merge` counts them, or less if there are more threads than cores."""
    per_machine = ceil(workers / spec.machines)
    threads = max(1, spec.machine.cores // per_machine // roles)
    return min(1 / per_machine, threads / spec.machine.cores)


def apply_placement(config: PipelineConfig, spec: ClusterSpec) -> PipelineConfig:
    """Return the pipeline with the workers and GPUs of the spec's placement, on a Ray cluster if the spec has several machines. Raises:
    ConfigError for a placement that `opd merge` would refuse as keys of the pipeline."""
    changes = placement_keys(config, spec)
    if spec.machines > 1 and config.cluster.address == LOCAL:
        changes = apply_change(changes, {"cluster": {"address": "auto"}})  # several machines are a Ray cluster
    if not changes:
        return config
    changed = apply_change(config.model_dump(mode="json", exclude_unset=True), changes)
    return validate_section(PipelineConfig, changed, f"{config.name} in the placement of {spec.name}")


def placement_keys(config: PipelineConfig, spec: ClusterSpec) -> Data:
    """Return the spec's placement as keys of the pipeline; none if it has no placement. On GPUs that roles share, each role has the share
    that the pipeline gives it, or an equal one if some role has none."""
    placement = spec.placement
    if placement is None:
        return {}
    scores = config.teachers.scoring_workers > 0
    workers: Data = {"rollout": {"workers": placement.rollout.workers}, "trainer": {"ranks": placement.ranks}}
    if scores:
        workers["teachers"] = {"workers": placement.teachers.workers}
    if not spec.machine.gpus:
        return workers
    divided = {"rollout": {"tensor_parallel_size": placement.rollout.devices}}
    keys = ("rollout_gpus", "trainer_gpus", *(("teacher_gpus",) if scores else ()))
    cluster = {key: getattr(config.cluster, key) for key in keys}
    if not placement.shared:
        cluster = dict.fromkeys(keys, 1)
    elif not all(0 < share < 1 for share in cluster.values()):
        cluster = dict.fromkeys(keys, floor(100 / (len(keys) + len(config.objective.judging_models))) / 100)
    if isinstance(config.teachers, VLLMTeachers):
        divided["teachers"] = {"tensor_parallel_size": placement.teachers.devices}
    elif layers := _map_layers(config, placement.teachers.devices):
        divided["teachers"] = layers
        cluster["teacher_gpus"] = placement.teachers.devices  # whole ones: layers are not divided among shares
    return apply_change(apply_change(workers, divided), {"cluster": cluster})


def _map_layers(config: PipelineConfig, gpus: int) -> dict[str, Any]:
    """Return the keys of `teachers` that divide the layers of each teacher among `gpus` GPUs; empty if nothing is divided. `max_memory` is
    kept only if it names as many GPUs: sizes for another number of them say nothing."""
    teachers = config.teachers
    if not isinstance(teachers, TransformersTeachers) or (gpus == 1 and teachers.device_map is None):
        return {}
    sized_gpus = [device for device in teachers.max_memory if isinstance(device, int)]
    return {"device_map": "auto", "max_memory": teachers.max_memory if len(sized_gpus) == gpus else {}}
