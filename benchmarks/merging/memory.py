"""Memory and CPU time of a process and all that descend from it, their end, and CPU time of the machine. Linux only; needs nothing
but Python."""

from __future__ import annotations

import contextlib
import os
import signal
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

TICKS = os.sysconf("SC_CLK_TCK")


def family(pid: int) -> list[int]:
    """The process and all its descendants that are there now."""
    children = defaultdict(list)
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with _ended():
                children[int(_stat(int(entry.name))[1])].append(int(entry.name))
    found = [pid]
    for parent in found:  # it grows meanwhile
        found += children[parent]
    return found


def end_family(pid: int) -> None:
    """Kill the process and all its descendants, in whatever sessions they are."""
    for one in family(pid):
        with contextlib.suppress(OSError):
            os.kill(one, signal.SIGKILL)


def anonymous(pids: list[int]) -> dict[int, int]:
    """Bytes of anonymous memory by process; cheap enough to look often."""
    return {pid: _sum([pid], "status", ("RssAnon:",)) for pid in pids}


def title(pid: int) -> str:
    """Return what a process calls itself, a Ray actor without what it does just now; empty if it has ended."""
    with _ended():
        program, *words = Path(f"/proc/{pid}/cmdline").read_text().split("\0")
        if program.startswith("ray::"):
            return program.split(".")[0]
        return " ".join([Path(w).name if w.startswith("/") else w for w in [program, *words[:2]]])[:40].strip()
    return ""


def shared(pids: list[int]) -> int:
    """Bytes of mapped files and shared memory, each page once however many map it; the look takes tens of milliseconds."""
    return _sum(pids, "smaps_rollup", ("Pss_File:", "Pss_Shmem:"))


def cpu_s(pids: list[int]) -> float:
    """CPU seconds, with those of children that have ended."""
    ticks = 0
    for pid in pids:
        with _ended():
            ticks += sum(map(int, _stat(pid)[11:15]))
    return ticks / TICKS


def machine_cpu_s() -> float:
    """CPU seconds of everything on this machine since it was started, with what other machines took of its cores."""
    user, nice, system, _, _, *more = map(int, Path("/proc/stat").read_text().split(maxsplit=9)[1:9])
    return (user + nice + system + sum(more)) / TICKS


def _stat(pid: int) -> list[str]:
    """Fields of /proc/PID/stat from the third on; the second, a name, may have blanks."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()


def _sum(pids: list[int], file: str, keys: tuple[str, ...]) -> int:
    total = 0
    for pid in pids:
        with _ended():
            lines = Path(f"/proc/{pid}/{file}").read_text().splitlines()
            total += sum(1024 * int(line.split()[1]) for line in lines if line.startswith(keys))
    return total


@contextlib.contextmanager
def _ended() -> Iterator[None]:
    """A process may end while one looks at it."""
    with contextlib.suppress(OSError):
        yield
