"""The environment of a worker's process."""

from __future__ import annotations

import os


def worker_env(workers: int, roles: int = 1) -> dict[str, str]:
    """Environment of one of a role's `workers`, which compute at the same time on one machine; `roles` such roles do.

    Two OpenMP jobs with all cores each slow each other down 40-fold, and spinning threads add to it: each role gets its
    share of the cores and waits passively.
    """
    threads = max(1, cores() // roles // workers)
    return {
        "OMP_NUM_THREADS": str(threads),
        "OMP_WAIT_POLICY": "PASSIVE",
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",
    }


def cores() -> int:
    """Cores that this process may use: fewer than the machine has if it was bound to some of them."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1  # no such binding on macOS
