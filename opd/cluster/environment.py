"""The environment variables of a worker's process: threads, memory and GPUs."""

from __future__ import annotations

import os

VISIBLE_GPUS = "OPD_VISIBLE_GPUS"
"""Variable with the GPUs of a worker that shares several, in the form of CUDA_VISIBLE_DEVICES, which Ray sets to only one of them."""
FEW_ARENAS = {"MALLOC_ARENA_MAX": "2"}
"""malloc would have an arena of memory for each thread. Ray and gloo have three dozen threads in a worker, and each arena would take
a large page or more, nearly all of it empty."""
SPIN_SETTINGS = {"OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": "10000"}
"""Settings with which OpenMP's threads, waiting for each other, spin for a moment, then sleep. Measured with vLLM engines on two cores
(SmolLM2-135M, 64 prompts of 150 tokens, 8 tokens to each), in seconds for one engine, and for each of two engines at the same time:

    these settings                        1.05    2.5
    sleeping at once                      1.25    1.9
    OpenMP's default, 30 times the spin   1.05    5.0
"""
KEEPS_SOME_MEMORY = FEW_ARENAS | {
    "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1",
    "MALLOC_MMAP_THRESHOLD_": str(32 << 20),
    "MALLOC_TRIM_THRESHOLD_": str(64 << 20),
    "MALLOC_TOP_PAD_": str(16 << 20),
}
"""Variables for a worker on the CPU that only computes forward passes. malloc keeps up to 64 MiB of freed memory; blocks of 32 MiB and
more go back to the system. 64 MiB is also the most to which malloc's own limit grows in time, but that begins with 128 KiB, and the
system clears every page that a process takes again: 17,000 of them when ten tiny teachers score a step, a fifth of the time."""


def worker_env(workers: int, roles: int = 1) -> dict[str, str]:
    """Return the environment variables of every worker.

    `workers`: number of workers of its role on this machine, which compute at the same time. `roles`: number of roles that
    compute at the same time. Each worker gets its share of the cores: two OpenMP jobs that both use all cores slow each other
    down 40-fold.
    """
    threads = max(1, count_cores() // (roles * workers))
    return {
        "OMP_NUM_THREADS": str(threads),
        **SPIN_SETTINGS,
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",
    }


def count_cores() -> int:
    """Return the number of cores that this process may use, which are fewer than the machine's if it is bound to some of them."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1  # no such binding on macOS
