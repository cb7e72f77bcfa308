"""The environment of a worker's process."""

from __future__ import annotations

import os

FEW_ARENAS = {"MALLOC_ARENA_MAX": "2"}
"""Each of Ray's and gloo's threads, three dozen in a worker, would have malloc set memory apart for it: a large page or more each,
nearly all of it empty."""
SPIN_SETTINGS = {"OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": "10000"}
"""How OpenMP's threads wait for each other: a moment awake, then asleep. Asleep at once, a vLLM engine on two cores took 1.25 s for what
takes 1.05 s like this. With OpenMP's own default, thirty times as long, it is as fast, but two such engines on the same cores took
5.0 s each; like this 2.5 s, asleep at once 1.9 s (SmolLM2-135M, 64 prompts of 150 tokens and 8 tokens to each)."""
KEEPS_SOME_MEMORY = FEW_ARENAS | {
    "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1",
    "MALLOC_MMAP_THRESHOLD_": str(32 << 20),
    "MALLOC_TRIM_THRESHOLD_": str(64 << 20),
    "MALLOC_TOP_PAD_": str(16 << 20),
}
"""Environment of a worker on the CPU that only computes forward passes. Of freed memory malloc keeps up to 64 MiB, which is the most
that it would keep by itself one day, and larger blocks go back as ever. By itself it begins with 128 KiB, and the system clears
every page that comes back: 17,000 of them when ten tiny teachers score a step, a fifth of the time that takes."""


def worker_env(workers: int, roles: int = 1) -> dict[str, str]:
    """Return the environment of one of a role's `workers`, which compute at the same time on one machine; `roles` such roles do.

    Two OpenMP jobs with all cores each slow each other down 40-fold, and spinning threads add to it: each role gets its
    share of the cores and spins for no longer than pays.
    """
    threads = max(1, count_cores() // roles // workers)
    return {
        "OMP_NUM_THREADS": str(threads),
        **SPIN_SETTINGS,
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",
    }


def count_cores() -> int:
    """Return the number of cores that this process may use: fewer than the machine has if it was bound to some of them."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1  # no such binding on macOS
