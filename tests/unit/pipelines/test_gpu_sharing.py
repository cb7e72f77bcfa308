"""Workers that share a GPU: rank i, engine i and scorer i, as far as their shares add up."""

from __future__ import annotations

import itertools

import pytest

from opd.config.devices import WorkerGpus
from pipelines.gpu_sharing import SharingRole, deal_workers

RANKS, ENGINES, SCORERS = "rank", "engine", "scorer"


def role(name: str, workers: int, share: float, gpus: int = 1) -> SharingRole:
    return SharingRole(name=name, workers=workers, gpus=WorkerGpus(gpus, share), apart=name != SCORERS)


def dealt(*roles: SharingRole) -> list[set[str]]:
    return [{f"{worker.role} {worker.index}" for worker in gpu} for gpu in deal_workers(roles)]


def test_the_plan_of_eight_gpus() -> None:
    eight = dealt(role(RANKS, 8, 0.4), role(ENGINES, 8, 0.4), role(SCORERS, 8, 0.2))
    assert eight == [{f"rank {i}", f"engine {i}", f"scorer {i}"} for i in range(8)]


@pytest.mark.parametrize(
    ("roles", "gpus"),
    [
        # Fewer of one role leave GPUs without it; more scorers than GPUs are dealt out once more.
        ([role(RANKS, 4, 0.5), role(ENGINES, 2, 0.5)], [{"rank 0", "engine 0"}, {"rank 1", "engine 1"}, {"rank 2"}, {"rank 3"}]),
        ([role(RANKS, 2, 0.5), role(SCORERS, 4, 0.2)], [{"rank 0", "scorer 0", "scorer 2"}, {"rank 1", "scorer 1", "scorer 3"}]),
        ([role(SCORERS, 3, 0.3)], [{"scorer 0", "scorer 1", "scorer 2"}]),
        # Where shares do not add up, a worker goes on to the next GPU, or to a new one.
        ([role(RANKS, 1, 0.5), role(ENGINES, 1, 0.5), role(SCORERS, 1, 0.5)], [{"rank 0", "engine 0"}, {"scorer 0"}]),
        ([role(RANKS, 2, 0.9), role(ENGINES, 1, 0.5), role(SCORERS, 1, 0.5)], [{"rank 0"}, {"rank 1"}, {"engine 0", "scorer 0"}]),
        # Two ranks, or two engines, are never on one GPU.
        ([role(RANKS, 2, 0.1), role(ENGINES, 3, 0.1)], [{"rank 0", "engine 0"}, {"rank 1", "engine 1"}, {"engine 2"}]),
        # An engine of two processes is on two GPUs.
        (
            [role(RANKS, 4, 0.5), role(ENGINES, 2, 0.5, gpus=2)],
            [{"rank 0", "engine 0"}, {"rank 1", "engine 0"}, {"rank 2", "engine 1"}, {"rank 3", "engine 1"}],
        ),
        ([role(RANKS, 1, 0.5), role(ENGINES, 1, 0.5, gpus=2)], [{"rank 0", "engine 0"}, {"engine 0"}]),
    ],
)  # fmt: skip
def test_who_meets_whom(roles: list[SharingRole], gpus: list[set[str]]) -> None:
    for order in itertools.permutations(roles):
        assert dealt(*order) == gpus
