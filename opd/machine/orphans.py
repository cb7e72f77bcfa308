"""Processes and directories that a killed run leaves behind, and how the next command finds and removes them.

Every process, and every directory outside the run directory, carries the mark of the driver that made it. A mark belongs to
one process and will never belong to another one. So if that process is gone, whatever carries its mark is a leftover.
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
"""Environment variable with the driver's mark; every process that a driver starts inherits it."""
OWNER = "OPD_OWNER"
"""Environment variable with the mark of a worker, in processes that serve this worker alone, such as an agent's program."""
SHARED_MEMORY = Path("/dev/shm")
RAY_VARIABLES = ("RAY_TMPDIR", "TMPDIR")
"""Environment variables that name the directory in which Ray makes its temporary one; the first that is set counts."""
END_TIMEOUT_S = 10.0
"""Longest wait for killed processes to be gone."""
_KEEP_ENVIRONMENT = "SPT_NOENV"
"""Processes of Ray and vLLM set a title, which overwrites the environment that other processes see, and so the mark. With
this variable set, the title leaves the environment alone."""
_MARK = re.compile(r"^opd-run-(\d+-\d+-\d+)-")
SHORT = "opd-ray-"
"""Beginning of the names of directories whose path has to be short. Their mark is in a file inside, not in the name."""
_MARK_FILE = "opd-driver"


def driver_mark() -> str:
    """Return the mark of this process: its number, the time of its start, and the namespace that its number belongs to.

    The time is in ticks since the machine started. A clock time would change when the clock is set.
    """
    return f"{os.getpid()}-{_read_start(os.getpid())[0]}-{_pid_namespace()}"


def directory_prefix() -> str:
    """Return how the names of this process's temporary directories begin; it includes the process's mark."""
    return f"opd-run-{driver_mark()}-"


def make_short_directory(parent: Path) -> Path:
    """Make a directory that no other user can enter, whatever the umask, and put this process's mark into it.

    Returns its path, which is 17 bytes longer than `parent`. Raises: OSError.
    """
    directory = Path(tempfile.mkdtemp(prefix=SHORT, dir=parent))
    (directory / _MARK_FILE).write_text(driver_mark(), encoding="utf-8")
    return directory


@contextmanager
def mark_children() -> Iterator[None]:
    """Make a context in which every started process carries this process's mark, and so do the processes that it starts."""
    os.environ |= {VARIABLE: driver_mark(), _KEEP_ENVIRONMENT: "1"}
    try:
        yield
    finally:
        for name in (VARIABLE, _KEEP_ENVIRONMENT):
            os.environ.pop(name, None)


@contextmanager
def mark_children_as_owned() -> Iterator[None]:
    """Make a context in which every started process carries this process's mark as the mark of its owner (`OWNER`)."""
    os.environ[OWNER] = driver_mark()
    try:
        yield
    finally:
        os.environ.pop(OWNER, None)


def end_own_processes() -> list[str]:
    """End every process that carries this process's mark, and delete the directories of processes that are gone.

    Returns the names of the processes and directories.
    """
    return [*_kill_processes(_find_own_processes()), *delete_directories()]


def end_abandoned_processes() -> list[str]:
    """End processes whose owner, a worker of this driver, is gone, and delete directories of processes that are gone.

    Otherwise an agent's program would go on and disturb the program that repeats its episode, and processes of a dead
    worker's engine would hold memory that the next engine needs. Returns the names of the processes and directories.
    """
    abandoned = [p for p in _find_own_processes() if (owner := _read_mark(p, OWNER)) and not is_driver_alive(owner)]
    return [*_kill_processes(abandoned), *delete_directories()]


def end_orphans() -> list[str]:
    """End the processes and delete the directories of drivers that are gone. Returns their names, for people."""
    orphans = [p for p in psutil.process_iter() if (driver := _read_mark(p)) and not is_driver_alive(driver)]
    return [*_kill_processes(orphans), *delete_directories()]


def _pid_namespace() -> int:
    """Return the namespace of this process's number. Each container numbers its processes anew, and several may share a /tmp."""
    return Path("/proc/self/ns/pid").stat().st_ino


def _read_start(pid: int) -> tuple[str, str]:
    """Return when a process started (ticks since boot), and its state letter. Raises: OSError if there is no such process."""
    # Fields are counted from behind the process's name, because the name may contain spaces and brackets.
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return fields[19], fields[0]


def _find_own_processes() -> list[psutil.Process]:
    """Return every other process that carries this process's mark."""
    own_mark = driver_mark()
    return [p for p in psutil.process_iter() if p.pid != os.getpid() and _read_mark(p) == own_mark]


def _read_mark(process: psutil.Process, variable: str = VARIABLE) -> str:
    try:
        return process.environ().get(variable, "")
    except (psutil.Error, OSError):  # the process belongs to another user, or is gone by now
        return ""


def is_driver_alive(driver: str) -> bool:
    """Return True if the driver with this mark is alive, or if that cannot be known because it is in another container."""
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
    # A process with this number but another start is a later one. A zombie (Z) is dead, but its parent has not noticed yet.
    return int(ticks) == started and state != "Z"


def _kill_processes(processes: list[psutil.Process]) -> list[str]:
    """Kill the processes with SIGKILL, which also ends suspended processes. Returns their names."""
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
    """Delete the temporary directories of processes that are gone. Returns their paths."""
    removed = []
    parents = {SHARED_MEMORY, Path(tempfile.gettempdir()), ray_parent()}
    for parent in filter(Path.is_dir, parents):
        for path in (*parent.glob("opd-run-*"), *parent.glob(f"{SHORT}*")):
            driver = _read_directory_mark(path)
            if driver and path.is_dir() and not path.is_symlink() and not is_driver_alive(driver):
                shutil.rmtree(path, ignore_errors=True)  # ignores errors, since it may belong to another user
                removed += [] if path.exists() else [str(path)]
    return removed


def ray_parent() -> Path:
    """Return the directory in which Ray would have its temporary one."""
    return Path(next(filter(None, map(os.environ.get, RAY_VARIABLES)), "/tmp"))


def _read_directory_mark(directory: Path) -> str:
    """Return the mark of the process that made a directory; empty if it has none, or cannot be read (another user's)."""
    match = _MARK.match(directory.name)
    if match:
        return match[1]
    try:
        return (directory / _MARK_FILE).read_text(encoding="utf-8")
    except (OSError, ValueError):
        return ""
