"""Starting Ray, and stopping it with all that it started."""

from __future__ import annotations

import os
import secrets
import signal
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from opd import leftovers
from opd.address import LOOPBACK
from opd.cluster import search_path
from opd.cluster.background import end_background
from opd.cluster.daemons import no_daemon_stands_still
from opd.cluster.errors import WorkerDied
from opd.cluster.watching import Watch
from opd.config.sections import ClusterConfig
from opd.errors import ConfigError, RunError

LOCAL = "local"
"""The address that means Ray on this machine, started and stopped by us."""

_watch: Watch | None = None
"""The watch of the session under way. It is a global because a process has one Ray, and so one session at a time."""


def current_watch() -> Watch:
    """The watch of the session under way. Raises: WorkerDied outside of a session."""
    if _watch is None:
        raise WorkerDied("Ray itself is gone: its session has ended, or was not begun")
    return _watch


@contextmanager
def ray_session(config: ClusterConfig, num_workers: int) -> Iterator[None]:
    """Connect to the cluster, or start Ray on this machine; stop it on exit.

    A local Ray listens on loopback only, has no dashboard, and asks for a token that lives as long as this process. The
    session first clears what earlier drivers left when they were killed, and none of its own processes outlives it.
    Raises: RunError if Ray would listen elsewhere; ConfigError if there is no cluster at the address.
    """
    global _watch
    if config.address == LOCAL:
        _keep_to_this_machine()
    import ray

    leftovers.sweep()
    watch = _watch = Watch(config.start_timeout_s)
    with no_daemon_stands_still():
        try:
            with leftovers.marked(), _own_signals():
                _connect(config, num_workers)
            yield
        except WorkerDied as error:
            if error.worker is None:
                leftovers.end_own()  # before Ray shuts down, which would wait for processes that do not answer
            raise
        finally:
            _watch = None  # no thread spawns a worker from here on
            end_background(watch.workers)
            watch.clear()
            ray.shutdown()
            leftovers.end_own()  # a process that is stopped or hung does not end by itself


def _connect(config: ClusterConfig, num_workers: int) -> None:
    """Start Ray here, or go to the cluster that there is.

    Raises: ConfigError if there is none, or if ours would have no room for its sockets; RunError if it would listen beyond this machine.
    """
    import ray

    if config.address != LOCAL:
        try:
            ray.init(
                address=config.address, log_to_driver=False, logging_level="ERROR", job_config=search_path.job_config()
            )
        except ConnectionError as error:
            raise ConfigError.at(
                "cluster.address",
                found=f"{config.address}: {error}",
                wanted="the address of a Ray cluster that runs",
                fix="start it with `ray start --head`, and `ray start --address` on its other machines, or leave the key out",
            ) from None
        return
    _refuse_long_directory()
    # CPUs are counted in workers, not cores: the phases take turns on the same cores.
    ray.init(
        address=LOCAL,  # without it Ray would join a cluster that this machine is part of
        num_cpus=num_workers,
        include_dashboard=False,
        log_to_driver=False,
        logging_level="ERROR",
        configure_logging=True,
        job_config=search_path.job_config(),
        # Else Ray waits for `num_cpus` processes that have none of the environment that our workers need.
        _system_config={"prestart_worker_first_driver": False},
    )
    _refuse_open_ports(ray.util.get_node_ip_address())


def room_for_sockets() -> int:
    """Longest temporary directory, in bytes: the path of a socket has at most 107, and Ray puts its session behind the directory."""
    return 107 - len(f"/ray/session_2026-11-24_22-15-05_673087_{os.getpid()}/sockets/plasma_store")


def too_long_for_sockets(environ: Mapping[str, str]) -> str | None:
    """The variable that names Ray's temporary directory, if Ray's sockets have no room there."""
    name = next((name for name in ("RAY_TMPDIR", "TMPDIR") if environ.get(name)), None)
    return name if name is not None and len(os.fsencode(environ[name])) > room_for_sockets() else None


def _refuse_long_directory() -> None:
    """Raises: ConfigError for a temporary directory in which Ray's sockets cannot lie."""
    name = too_long_for_sockets(os.environ)
    if name is not None:
        raise ConfigError.at(
            f"environment variable {name}",
            found=os.environ[name],
            wanted=f"a path of at most {room_for_sockets()} bytes: Ray makes sockets below it, whose paths have a limit",
            fix="set RAY_TMPDIR to a shorter directory, for example RAY_TMPDIR=/tmp",
        )


def _keep_to_this_machine() -> None:
    """Set the variables that Ray reads when it is imported.

    On Linux Ray turns 127.0.0.1 into the machine's outer address and listens there, unless it is told that there are no
    clusters. The token is ours, because Ray's own lies in a file that other users may be able to read.
    """
    os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"
    if "RAY_AUTH_TOKEN_PATH" not in os.environ:
        os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))


@contextmanager
def _own_signals() -> Iterator[None]:
    """Keep SIGTERM as it was: Ray takes it when it starts, and would end the driver in the middle of a step."""
    before = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, before)


def _refuse_open_ports(node_address: str) -> None:
    if node_address not in LOOPBACK:
        raise RunError(
            f"Ray listens on {node_address}, beyond this machine: something in this process imported ray before "
            "cluster.address `local` could keep it to loopback"
        )
