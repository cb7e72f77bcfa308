"""The way that new weights take into each process of the engines: from the rank on its own GPU, or from rank 0's broadcast."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, count

from opd.errors import RunError
from opd.models.buckets import BucketSlot

SENDER = 0
"""The rank in the broadcasting group of the trainer's rank 0, the only one that sends."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """The way of the weights into one process of an engine. Exactly one of the two ranks is set."""

    process: int
    """Number of the process among those of all engines."""
    group_rank: int | None = None
    """Rank of the process in the broadcasting group."""
    trainer_rank: int | None = None
    """The trainer's rank whose GPU the process shares, and whose buffers it reads."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MeetingPoint:
    """Place where the processes of a channel find each other."""

    address: str
    port: int
    """Port of rank 0's store."""
    group_size: int
    """Processes in the broadcasting group, rank 0 included; 1 if all processes share a rank's GPU, and there is no group."""
    timeout_s: float
    """Deadline of every wait of one process for others."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PushPlan:
    """Plan of a push's contents. All ranks and all engines go by it, and nothing has been gathered for it."""

    whole: bool
    """True if all weights of the model come."""
    buckets: tuple[tuple[BucketSlot, ...], ...]
    """For each bucket, name, type, shape and position of its tensors."""

    @property
    def sizes(self) -> list[int]:
        """Bytes of each bucket."""
        return [slots[-1].end for slots in self.buckets]


@dataclass(frozen=True, slots=True, kw_only=True)
class DirectPush:
    """One push as an engine needs to know it."""

    number: int
    """Number of the push in its channel, so that its signals differ from those of others."""
    plan: PushPlan
    handles: Mapping[int, tuple[bytes, ...]]
    """Number of a process that reads a rank's buffers -> its own handles to them."""


def plan_routes(rank_memory: Sequence[str], engine_memory: Sequence[Sequence[str]]) -> list[list[Route]]:
    """Return [engine][process] the routes. The arguments have the `find_memory_id` of each rank and of each process of each engine.

    NCCL refuses two processes of one group on one GPU. So a process on a rank's GPU reads that rank's memory, and all others are in one
    group with rank 0, every engine at an offset of its own. Raises: RunError if two of these have the same GPU.
    """
    ranks = {memory: rank for rank, memory in reversed(list(enumerate(rank_memory))) if memory}
    numbers, offsets = count(), count(SENDER + 1)
    routes = [
        [
            Route(process=next(numbers), trainer_rank=ranks[memory])
            if memory in ranks
            else Route(process=next(numbers), group_rank=next(offsets))
            for memory in engine
        ]
        for engine in engine_memory
    ]
    in_group = [m for m in chain(*engine_memory) if m and m not in ranks]
    if len(set(in_group)) < len(in_group):
        raise RunError(
            "sync.kind direct: two processes of rollout engines share a GPU that no trainer rank is on, and NCCL refuses that: give each "
            "engine a GPU of its own (cluster.rollout_gpus), or set sync.kind to network"
        )
    return routes
