"""Memory that a merge takes on this machine: the driver, its workers, and Ray beside them."""

from __future__ import annotations

import time
from collections.abc import Iterator

import psutil

AGAIN_S = 5.0
"""Seconds until the processes are looked at again: each look reads a file for every process of the machine."""
DRIVER, WORKERS, RAY = "driver", "workers", "Ray"


def memory_of(pid: int) -> tuple[tuple[str, int], ...]:
    """Return process -> bytes that no other process shares, of a driver and all that it started; empty if there is no such
    process.

    Experts' weights that teachers have mapped are not counted: they are the system's to take back.
    """
    totals = dict.fromkeys((DRIVER, WORKERS, RAY), 0)
    for owner, nbytes in _process_parts(pid):
        totals[owner] += nbytes
    return tuple((owner, nbytes) for owner, nbytes in totals.items() if nbytes)


def _process_parts(pid: int) -> Iterator[tuple[str, int]]:
    try:
        driver = psutil.Process(pid)
        yield DRIVER, _private_bytes(driver)
        children = driver.children(recursive=True)
    except (psutil.NoSuchProcess, psutil.AccessDenied):
        return
    for child in children:
        try:
            is_worker = " ".join(child.cmdline()).startswith("ray::")  # the name that Ray gives to who holds an actor
            yield WORKERS if is_worker else RAY, _private_bytes(child)
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue  # it has just ended, or belongs to somebody else


def _private_bytes(process: psutil.Process) -> int:
    usage = process.memory_info()
    return int(usage.rss - getattr(usage, "shared", 0))


class Memory:
    """The memory of one process and its workers, looked at now and then."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._usage: tuple[tuple[str, int], ...] = ()
        self._next = 0.0

    def read_usage(self) -> tuple[tuple[str, int], ...]:
        """Return the result of `memory_of`, at most `AGAIN_S` ago."""
        if time.monotonic() >= self._next:
            self._usage = memory_of(self._pid)
            self._next = time.monotonic() + AGAIN_S
        return self._usage
