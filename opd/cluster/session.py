"""Starting Ray, and stopping it with all that it started."""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from opd.cluster import search_path
from opd.cluster.background import end_background
from opd.cluster.daemons import kill_stopped_daemons
from opd.cluster.errors import WorkerDied
from opd.cluster.watching import WorkerWatch
from opd.config.sections import ClusterConfig
from opd.errors import ConfigError, RunError
from opd.machine import leftovers
from opd.machine.address import LOOPBACK

RAY_DIRECTORY = "r"
"""Name of Ray's temporary directory in ours; the path of a socket is short."""
LOCAL = "local"
"""The address that means Ray on this machine, started and stopped by us."""

_failed_directories: list[Path] = []
"""Directories of sessions of this process that ended with a RunError, whose logs may be of use until the next session."""
_watch: WorkerWatch | None = None
"""The watch of the session under way. It is a global because a process has one Ray, and so one session at a time."""


def current_watch() -> WorkerWatch:
    """Return the watch of the session under way. Raises: WorkerDied outside of a session."""
    if _watch is None:
        raise WorkerDied("Ray itself is gone: its session has ended, or was not begun")
    return _watch


@contextmanager
def ray_session(config: ClusterConfig, num_workers: int) -> Iterator[None]:
    """Connect to the cluster, or start Ray on this machine; stop it on exit.

    A local Ray listens on loopback only, has no dashboard, asks for a token that lives as long as this process, and has its files
    where no other user gets. They go with the session, but after a RunError, which Ray's logs may explain, with the next one. The
    session first clears what earlier drivers left when they were killed, and none of its own processes outlives it.
    Raises: RunError if Ray would listen elsewhere; ConfigError if there is no cluster at the address, or no place for Ray's files.
    """
    global _watch
    if config.address == LOCAL:
        _restrict_ray_to_loopback()
    import ray

    leftovers.end_orphans()
    while _failed_directories:
        shutil.rmtree(_failed_directories.pop(), ignore_errors=True)
    directory = _make_own_directory() if config.address == LOCAL else None
    watch = _watch = WorkerWatch(config.start_timeout_s)
    with kill_stopped_daemons():
        try:
            with leftovers.mark_children(), _keep_sigterm_handler():
                _connect_to_ray(config, num_workers, directory)
            yield
        except RunError as error:
            if directory is not None:
                _failed_directories.append(directory)
            if isinstance(error, WorkerDied) and error.worker is None:
                leftovers.end_own_processes()  # before Ray shuts down, which would wait for processes that do not answer
            raise
        finally:
            _watch = None  # no thread spawns a worker from here on
            end_background(watch.workers)
            watch.stop_watching_all()
            ray.shutdown()
            leftovers.end_own_processes()  # a process that is stopped or hung does not end by itself
            if directory is not None and directory not in _failed_directories:
                shutil.rmtree(directory, ignore_errors=True)


def _connect_to_ray(config: ClusterConfig, num_workers: int, directory: Path | None) -> None:
    """Start Ray here with its files in `directory`, or without one go to the cluster that there is.

    Raises: ConfigError if there is none; RunError if ours would listen beyond this machine.
    """
    import ray

    if directory is None:
        try:
            ray.init(
                address=config.address,
                log_to_driver=False,
                logging_level="ERROR",
                job_config=search_path.make_job_config(),
            )
        except ConnectionError as error:
            raise ConfigError.at(
                "cluster.address",
                found=f"{config.address}: {error}",
                wanted="the address of a Ray cluster that runs",
                fix="start it with `ray start --head`, and `ray start --address` on its other machines, or leave the key out",
            ) from None
        return
    # CPUs are counted in workers, not cores: the phases take turns on the same cores.
    ray.init(
        address=LOCAL,  # without it Ray would join a cluster that this machine is part of
        num_cpus=num_workers,
        include_dashboard=False,
        log_to_driver=False,
        logging_level="ERROR",
        configure_logging=True,
        _temp_dir=str(
            directory / RAY_DIRECTORY
        ),  # Ray opens the directory itself to everybody, but not the one above it
        job_config=search_path.make_job_config(),
        # Else Ray waits for `num_cpus` processes that have none of the environment that our workers need.
        _system_config={"prestart_worker_first_driver": False},
    )
    _refuse_open_ports(ray.util.get_node_ip_address())


def max_socket_directory_bytes() -> int:
    """Return the most bytes that a temporary directory's path may have: a socket's has at most 107, and Ray's session lies between."""
    session = f"session_2026-11-24_22-15-05_673087_{os.getpid()}/sockets/plasma_store"
    return 107 - len(f"/{leftovers.SHORT}xxxxxxxx/{RAY_DIRECTORY}/{session}")


def find_long_ray_variable(environ: Mapping[str, str]) -> str | None:
    """Return the variable that names Ray's temporary directory, if Ray's sockets have no room there."""
    name = next((name for name in leftovers.RAY_VARIABLES if environ.get(name)), None)
    return name if name is not None and len(os.fsencode(environ[name])) > max_socket_directory_bytes() else None


def _make_own_directory() -> Path:
    """Make the directory that a session of Ray's lies in, of mode 0700: Ray opens its own, and its sockets, to every user of the machine.

    Raises: ConfigError for a temporary directory in which it cannot be, or in which Ray's sockets cannot lie.
    """
    name = find_long_ray_variable(os.environ)
    if name is not None:
        raise ConfigError.at(
            f"environment variable {name}",
            found=os.environ[name],
            wanted=f"a path of at most {max_socket_directory_bytes()} bytes: Ray makes sockets below it, whose paths have a limit",
            fix="set RAY_TMPDIR to a shorter directory, for example RAY_TMPDIR=/tmp",
        )
    parent = leftovers.ray_parent()
    try:
        parent.mkdir(parents=True, exist_ok=True)
        return leftovers.make_short_directory(parent.absolute())
    except OSError as error:
        raise ConfigError.at(
            "temporary directory",
            found=f"{parent}: {error.strerror}",
            wanted="a directory that this user may write to, for Ray's sockets and logs",
            fix="set RAY_TMPDIR to one whose path is short",
        ) from None


def _restrict_ray_to_loopback() -> None:
    """Set the variables that Ray reads when it is imported.

    On Linux Ray turns 127.0.0.1 into the machine's outer address and listens there, unless it is told that there are no
    clusters. The token is ours, because Ray's own lies in a file that other users may be able to read.
    """
    os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"
    if "RAY_AUTH_TOKEN_PATH" not in os.environ:
        os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))


@contextmanager
def _keep_sigterm_handler() -> Iterator[None]:
    """Keep SIGTERM as it was: Ray takes it when it starts, and would end the driver in the middle of a step."""
    handler = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, handler)


def _refuse_open_ports(node_address: str) -> None:
    if node_address not in LOOPBACK:
        raise RunError(
            f"Ray listens on {node_address}, beyond this machine: something in this process imported ray before "
            "cluster.address `local` could keep it to loopback"
        )
