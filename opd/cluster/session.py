"""The session of Ray: starting it or connecting to it, and stopping it with all that it started."""

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
from opd.cluster.daemons import kill_suspended_daemons
from opd.cluster.errors import WorkerDied
from opd.cluster.watching import WorkerWatch
from opd.config.sections import ClusterConfig
from opd.errors import ConfigError, RunError
from opd.machine import orphans
from opd.machine.address import LOOPBACK

RAY_DIRECTORY = "r"
"""Name of Ray's temporary directory in ours. It is short because the paths of sockets have a limit."""
LOCAL = "local"
"""Value of `cluster.address` for a Ray on this machine that we start and stop."""

_failed_directories: list[Path] = []
"""Directories of this process's sessions that ended with a RunError. Their logs may explain it, so they stay until the next session."""
_watch: WorkerWatch | None = None
"""The watch of the running session. It is a global, because a process has one Ray and so one session at a time."""


def get_current_watch() -> WorkerWatch:
    """Return the watch of the running session. Raises: WorkerDied outside of a session."""
    if _watch is None:
        raise WorkerDied("Ray itself is gone: its session has ended, or was not begun")
    return _watch


@contextmanager
def ray_session(config: ClusterConfig, num_workers: int) -> Iterator[None]:
    """Connect to the cluster, or start Ray on this machine; stop it on exit.

    A local Ray listens on loopback only, has no dashboard, and asks for a token that lives as long as this process. Its files lie
    where no other user can read them, and are deleted at the end of the session; after a RunError, which Ray's logs may explain,
    at the beginning of the next one. The session first ends the processes, and deletes the directories, that earlier, killed
    drivers have left. None of its own processes outlives it.
    Raises: RunError if Ray would listen elsewhere; ConfigError if there is no cluster at the address, or no place for Ray's files.
    """
    global _watch
    if config.address == LOCAL:
        _restrict_ray_to_loopback()
    import ray

    orphans.end_orphans()
    while _failed_directories:
        shutil.rmtree(_failed_directories.pop(), ignore_errors=True)
    directory = _make_own_directory() if config.address == LOCAL else None
    watch = _watch = WorkerWatch(config.start_timeout_s)
    with kill_suspended_daemons():
        try:
            with orphans.mark_children(), _keep_sigterm_handler():
                _connect_to_ray(config, num_workers, directory)
            yield
        except RunError as error:
            if directory is not None:
                _failed_directories.append(directory)
            if isinstance(error, WorkerDied) and error.worker is None:
                # Ray does not answer. Its processes end now, because `ray.shutdown` would wait for them.
                orphans.end_own_processes()
            raise
        finally:
            _watch = None  # from here on no thread can spawn a worker
            end_background(watch.workers)
            watch.stop_watching_all()
            ray.shutdown()
            orphans.end_own_processes()  # suspended or hung processes do not end by themselves
            if directory is not None and directory not in _failed_directories:
                shutil.rmtree(directory, ignore_errors=True)


def _connect_to_ray(config: ClusterConfig, num_workers: int, directory: Path | None) -> None:
    """Start a local Ray with its files in `directory`; with None, connect to the cluster at `config.address`.

    Raises: ConfigError if there is no such cluster; RunError if the local Ray listens beyond this machine.
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
    # For Ray we count one CPU for each worker, whatever cores there are: the roles take turns on the same cores.
    ray.init(
        address=LOCAL,  # without it Ray would join a cluster that this machine is part of
        num_cpus=num_workers,
        include_dashboard=False,
        log_to_driver=False,
        logging_level="ERROR",
        configure_logging=True,
        # Ray opens this directory to every user, but not `directory` above it.
        _temp_dir=str(directory / RAY_DIRECTORY),
        job_config=search_path.make_job_config(),
        # By default Ray first starts `num_cpus` processes, without the environment that our workers need, and waits for them.
        _system_config={"prestart_worker_first_driver": False},
    )
    _refuse_open_ports(ray.util.get_node_ip_address())


def max_socket_directory_bytes() -> int:
    """Return the most bytes that the path of the temporary directory may have.

    The path of a socket has at most 107 bytes, and Ray puts the names of its session's directories between the two.
    """
    session = f"session_2026-11-24_22-15-05_673087_{os.getpid()}/sockets/plasma_store"
    return 107 - len(f"/{orphans.SHORT}xxxxxxxx/{RAY_DIRECTORY}/{session}")


def find_long_ray_variable(environ: Mapping[str, str]) -> str | None:
    """Return the environment variable that names Ray's temporary directory, if that path is too long for Ray's sockets; else None."""
    name = next((name for name in orphans.RAY_VARIABLES if environ.get(name)), None)
    return name if name is not None and len(os.fsencode(environ[name])) > max_socket_directory_bytes() else None


def _make_own_directory() -> Path:
    """Make the directory, of mode 0700, in which Ray's temporary directory lies: Ray opens its own, and its sockets, to every user.

    Raises: ConfigError if it cannot be made in the temporary directory, or if its path is too long for Ray's sockets.
    """
    name = find_long_ray_variable(os.environ)
    if name is not None:
        raise ConfigError.at(
            f"environment variable {name}",
            found=os.environ[name],
            wanted=f"a path of at most {max_socket_directory_bytes()} bytes: Ray makes sockets below it, whose paths have a limit",
            fix="set RAY_TMPDIR to a shorter directory, for example RAY_TMPDIR=/tmp",
        )
    parent = orphans.ray_parent()
    try:
        parent.mkdir(parents=True, exist_ok=True)
        return orphans.make_short_directory(parent.absolute())
    except OSError as error:
        raise ConfigError.at(
            "temporary directory",
            found=f"{parent}: {error.strerror}",
            wanted="a directory that this user may write to, for Ray's sockets and logs",
            fix="set RAY_TMPDIR to one whose path is short",
        ) from None


def _restrict_ray_to_loopback() -> None:
    """Set environment variables by which Ray listens on loopback only, and asks for a token. Ray reads them when it is imported.

    On Linux Ray replaces 127.0.0.1 by the machine's outer address and listens there, unless it is told that there are no clusters.
    The token is made here, because Ray's own is in a file that other users may be able to read.
    """
    os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"
    if "RAY_AUTH_TOKEN_PATH" not in os.environ:
        os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))


@contextmanager
def _keep_sigterm_handler() -> Iterator[None]:
    """Restore the handler of SIGTERM at the end: Ray sets its own when it starts, which would end the driver within a step."""
    handler = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, handler)


def _refuse_open_ports(node_address: str) -> None:
    """Refuse a local Ray that does not listen on loopback. Raises: RunError."""
    if node_address not in LOOPBACK:
        raise RunError(
            f"Ray listens on {node_address}, beyond this machine: something in this process imported ray before "
            "cluster.address `local` could keep it to loopback"
        )
