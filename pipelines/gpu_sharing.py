"""Deal workers that have a share of a GPU out to GPUs: rank 0, engine 0 and scorer 0 to the first, rank 1, engine 1 and scorer 1 to the
second, and so on. A worker that has no room there goes to the next GPU that has.

`pipelines/placement.py` reserves what is dealt here, and `pipelines/sizing/gpu_memory.py` adds up what each GPU has to hold.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from opd.config.devices import WorkerGpus


@dataclass(frozen=True, slots=True, kw_only=True)
class SharingRole:
    """The workers of one role, which share GPUs with those of other roles."""

    name: str
    workers: int
    gpus: WorkerGpus
    apart: bool
    """True if each worker needs GPUs on which no other of the role is: NCCL refuses two ranks of one group on a GPU, and vLLM
    measures free memory as it starts, which another engine would change."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DealtWorker:
    """A worker on one of its GPUs."""

    role: str
    index: int
    """Number of the worker within its role."""
    share: float


def deal_workers(roles: Sequence[SharingRole]) -> list[list[DealtWorker]]:
    """Return for each GPU the workers on it, whatever the order of the roles. A worker of several GPUs is on consecutive ones, the first
    of which has a number that their count divides."""
    gpus: list[list[DealtWorker]] = []
    # Those that need most GPUs for themselves come first, and the others find theirs among these.
    for role in sorted(roles, key=lambda role: (not role.apart, -role.workers * role.gpus.count, -role.gpus.share)):
        for index in range(role.workers):
            worker = DealtWorker(role=role.name, index=index, share=role.gpus.share)
            first = _find_room(gpus, worker, role)
            gpus += [[] for _ in range(first + role.gpus.count - len(gpus))]
            for gpu in gpus[first : first + role.gpus.count]:
                gpu.append(worker)
    return gpus


def _find_room(gpus: Sequence[Sequence[DealtWorker]], worker: DealtWorker, role: SharingRole) -> int:
    """Return the number of the first of the GPUs to which a worker goes; that of a new GPU if those that are there have no room."""
    count = role.gpus.count
    starts = range(0, len(gpus), count)
    for turn in range(len(starts)):
        first = starts[(worker.index + turn) % len(starts)]
        if all(_has_room(gpu, worker, apart=role.apart) for gpu in gpus[first : first + count]):
            return first
    return len(starts) * count


def _has_room(gpu: Sequence[DealtWorker], worker: DealtWorker, *, apart: bool) -> bool:
    # 1e-9: three shares that add up to 1 are a little more in floating point.
    fits = sum(other.share for other in gpu) + worker.share <= 1 + 1e-9
    return fits and not (apart and any(other.role == worker.role for other in gpu))
