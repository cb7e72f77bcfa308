"""Memory that a merge takes on this machine: the driver, its workers, and Ray beside them."""

from __future__ import annotations

import time
from contextlib import suppress

import psutil

PAUSE_S = 5.0
"""Pause between two measurements, because each reads a file for every process of the machine."""
DRIVER, WORKERS, RAY = "driver", "workers", "Ray"


def measure_memory(pid: int) -> tuple[tuple[str, int], ...]:
    """Return the memory of a driver, its workers and Ray: pairs of a name and of bytes that are shared with no other process.

    It is empty if there is no such process. Experts' weights that teachers have mapped do not count, because the system can
    drop their pages at any time.
    """
    sizes = dict.fromkeys((DRIVER, WORKERS, RAY), 0)
    try:
        driver = psutil.Process(pid)
        sizes[DRIVER] = _private_bytes(driver)
        children = driver.children(recursive=True)
    except (psutil.NoSuchProcess, psutil.AccessDenied):
        return ()
    for child in children:
        with suppress(psutil.NoSuchProcess, psutil.AccessDenied):  # it has just ended, or belongs to another user
            is_worker = " ".join(child.cmdline()).startswith("ray::")  # Ray's title of a process with an actor
            sizes[WORKERS if is_worker else RAY] += _private_bytes(child)
    return tuple((process, nbytes) for process, nbytes in sizes.items() if nbytes)


def _private_bytes(process: psutil.Process) -> int:
    usage = process.memory_info()
    return int(usage.rss - getattr(usage, "shared", 0))


class Memory:
    """The memory of a driver and its workers, measured anew only every `PAUSE_S` seconds."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._usage: tuple[tuple[str, int], ...] = ()
        self._next = 0.0

    def read_usage(self) -> tuple[tuple[str, int], ...]:
        """Return a result of `measure_memory` that is at most `PAUSE_S` seconds old."""
        if time.monotonic() >= self._next:
            self._usage = measure_memory(self._pid)
            self._next = time.monotonic() + PAUSE_S
        return self._usage
