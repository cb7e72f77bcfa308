"""Processes and directories that a killed run leaves behind, and how the next command finds and removes them.

Every process and every directory outside the run directory carries the mark of the driver that made it. A mark names one
process and no other, ever: if that process is gone, what carries the mark is a leftover, and nothing else is.
"""

from __future__ import annotations

import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil

VARIABLE = "OPD_DRIVER"
"""Environment variable with the mark; every process that a driver starts inherits it."""
OWNER = "OPD_OWNER"
"""Environment variable with the mark of the worker that started a process, such as an agent's program, for itself alone."""
SHARED_MEMORY = Path("/dev/shm")
RAY_VARIABLES = ("RAY_TMPDIR", "TMPDIR")
"""Variables that name the directory of Ray's temporary one, by precedence."""
END_TIMEOUT_S = 10.0
_KEPT = "SPT_NOENV"
"""Ray's and vLLM's processes set a title, which overwrites the environment that others see, and so the mark. This variable
prevents that."""
_MARK = re.compile(r"^opd-run-(\d+-\d+-\d+)-")
SHORT = "opd-ray-"
"""The beginning of the names of directories whose path has to be short. Such a one holds its mark in a file."""
_MARK_FILE = "opd-driver"


def driver_mark() -> str:
    """Return the mark of this process: its number, when it started, and the namespace that its number belongs to.

    The start is in ticks since the machine's start. By the clock it would be another one after the clock was set.
    """
    return f"{os.getpid()}-{_read_start(os.getpid())[0]}-{_pid_namespace()}"


def directory_prefix() -> str:
    """Return the beginning of the names of this process's temporary directories, with its mark."""
    return f"opd-run-{driver_mark()}-"


def make_short_directory(parent: Path) -> Path:
    """Make a directory that no other user can enter, whatever the umask, with this process's mark. Returns its path: `parent` and 17
    bytes. Raises: OSError."""
    directory = Path(tempfile.mkdtemp(prefix=SHORT, dir=parent))
    (directory / _MARK_FILE).write_text(driver_mark(), encoding="utf-8")
    return directory


@contextmanager
def mark_children() -> Iterator[None]:
    """Let every process that is started within carry this one's mark, and so do the processes that it starts."""
    os.environ |= {VARIABLE: driver_mark(), _KEPT: "1"}
    try:
        yield
    finally:
        for name in (VARIABLE, _KEPT):
            os.environ.pop(name, None)


@contextmanager
def mark_children_as_owned() -> Iterator[None]:
    """Let every process that is started within carry this one's mark as that of its owner."""
    os.environ[OWNER] = driver_mark()
    try:
        yield
    finally:
        os.environ.pop(OWNER, None)


def end_own_processes() -> list[str]:
    """End every process that carries this one's mark, and remove the directories of those that are gone. Returns what was found."""
    return [*_kill_processes(_find_own_processes()), *delete_directories()]


def end_abandoned_processes() -> list[str]:
    """End what workers of this driver that are gone had started, and remove their directories. Returns what was found.

    Nobody would end an agent's program in time, and what it does would get in the way of the one that repeats its episode. A
    process of a dead worker's engine holds memory that the next engine needs.
    """
    abandoned = [p for p in _find_own_processes() if (owner := _read_mark(p, OWNER)) and not is_driver_alive(owner)]
    return [*_kill_processes(abandoned), *delete_directories()]


def end_orphans() -> list[str]:
    """End the processes and remove the directories of drivers that are gone. Returns what was found, for people."""
    orphans = [p for p in psutil.process_iter() if (driver := _read_mark(p)) and not is_driver_alive(driver)]
    return [*_kill_processes(orphans), *delete_directories()]


def _pid_namespace() -> int:
    """Return the namespace of process numbers: containers count processes on their own, and may share a machine's /tmp."""
    return Path("/proc/self/ns/pid").stat().st_ino


def _read_start(pid: int) -> tuple[str, str]:
    """Return when a process started (ticks since boot), and its state letter. Raises: OSError if there is none."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()  # the name may hold spaces and brackets
    return fields[19], fields[0]


def _find_own_processes() -> list[psutil.Process]:
    """Return every process that carries this one's mark, but for this one."""
    own_mark = driver_mark()
    return [p for p in psutil.process_iter() if p.pid != os.getpid() and _read_mark(p) == own_mark]


def _read_mark(process: psutil.Process, variable: str = VARIABLE) -> str:
    try:
        return process.environ().get(variable, "")
    except (psutil.Error, OSError):  # another user's, or gone meanwhile
        return ""


def is_driver_alive(driver: str) -> bool:
    """Return True if the driver with this mark lives, and also where that cannot be seen: for one in another container."""
    try:
        pid, started, namespace = map(int, driver.split("-"))
    except ValueError:
        return True  # the mark of another release: leave it alone
    if namespace != _pid_namespace():
        return True
    try:
        ticks, state = _read_start(pid)
    except (FileNotFoundError, ProcessLookupError):
        return False
    # A process with the number but another start is a later one; a zombie (Z) is dead, its parent has not noticed yet.
    return int(ticks) == started and state != "Z"


def _kill_processes(processes: list[psutil.Process]) -> list[str]:
    """Kill the processes with SIGKILL, which also ends a process that is stopped. Returns their names."""
    names = []
    for process in processes:
        try:
            names.append(f"process {process.pid} ({process.name()})")
            process.kill()
        except psutil.NoSuchProcess:
            names.pop()
    psutil.wait_procs(processes, timeout=END_TIMEOUT_S)
    return names


def delete_directories() -> list[str]:
    """Remove the directories of processes that are gone. Returns their paths."""
    removed = []
    parents = {SHARED_MEMORY, Path(tempfile.gettempdir()), ray_parent()}
    for parent in filter(Path.is_dir, parents):
        for path in (*parent.glob("opd-run-*"), *parent.glob(f"{SHORT}*")):
            driver = _read_directory_mark(path)
            if driver and path.is_dir() and not path.is_symlink() and not is_driver_alive(driver):
                shutil.rmtree(path, ignore_errors=True)  # may belong to another user
                removed += [] if path.exists() else [str(path)]
    return removed


def ray_parent() -> Path:
    """Return the directory in which Ray would have its temporary one."""
    return Path(next(filter(None, map(os.environ.get, RAY_VARIABLES)), "/tmp"))


def _read_directory_mark(directory: Path) -> str:
    """Return the mark of the process that made it; empty if it has none, or if it is another user's."""
    match = _MARK.match(directory.name)
    if match:
        return match[1]
    try:
        return (directory / _MARK_FILE).read_text(encoding="utf-8")
    except (OSError, ValueError):
        return ""
