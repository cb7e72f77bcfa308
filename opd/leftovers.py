"""What a run leaves behind when it is killed, and how the next command finds it: every process and directory outside the
run directory carries the mark of the driver that made it. A mark names a process beyond doubt, so a mark whose process is
gone is a leftover, and nothing else is.
"""

from __future__ import annotations

import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import psutil
from blake3 import blake3

VARIABLE = "OPD_RUN"
"""Environment of every process that a driver starts."""
SHARED_MEMORY = Path("/dev/shm")
END_TIMEOUT_S = 10.0
_MARK = re.compile(r"^opd-(\d+-\d+-[0-9a-f]{8})-")


def mark() -> str:
    """Of this process: its number, its start in hundredths of a second, and where such numbers mean what they do here."""
    return _mark_of(psutil.Process())


def prefix() -> str:
    """How the names of this process's temporary directories begin."""
    return f"opd-{mark()}-"


@contextmanager
def marked() -> Iterator[None]:
    """Processes that are started within carry this one's mark."""
    os.environ[VARIABLE] = mark()
    try:
        yield
    finally:
        os.environ.pop(VARIABLE, None)


def end_own() -> list[str]:
    """End every process that carries this one's mark. Returns their names."""
    return _end([p for p in psutil.process_iter() if p.pid != os.getpid() and _carried(p) == mark()])


def sweep() -> list[str]:
    """End the processes and remove the directories of drivers that are gone. Returns what was found, for people."""
    orphans = [p for p in psutil.process_iter() if (theirs := _carried(p)) and not _alive(theirs)]
    return [*_end(orphans), *_remove_directories()]


def _mark_of(process: psutil.Process) -> str:
    return f"{process.pid}-{round(100 * process.create_time())}-{_place()}"


@cache
def _place() -> str:
    """Of this machine since it was started and this container: others may share our directories, not our processes."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text()
    return blake3(f"{boot} {Path('/proc/self/ns/pid').readlink()}".encode()).hexdigest()[:8]


def _carried(process: psutil.Process) -> str:
    try:
        return process.environ().get(VARIABLE, "")
    except (psutil.Error, OSError):  # another user's, or gone meanwhile
        return ""


def _alive(theirs: str) -> bool:
    """Also true of what cannot be known here."""
    pid, *_, place = theirs.split("-")
    if place != _place():
        return True
    try:
        process = psutil.Process(int(pid))
        return _mark_of(process) == theirs and process.status() != psutil.STATUS_ZOMBIE
    except (psutil.NoSuchProcess, ValueError):
        return False


def _end(processes: list[psutil.Process]) -> list[str]:
    """SIGKILL, which a stopped process gets too."""
    names = []
    for process in processes:
        try:
            names.append(f"process {process.pid} ({process.name()})")
            process.kill()
        except psutil.NoSuchProcess:
            continue
    psutil.wait_procs(processes, timeout=END_TIMEOUT_S)
    return names


def _remove_directories() -> list[str]:
    found = []
    for parent in {SHARED_MEMORY, Path(tempfile.gettempdir())}:
        for path in parent.glob("opd-*") if parent.is_dir() else ():
            match = _MARK.match(path.name)
            if match and path.is_dir() and not path.is_symlink() and not _alive(match[1]):
                shutil.rmtree(path, ignore_errors=True)  # of another user, perhaps
                found += [] if path.exists() else [str(path)]
    return found
