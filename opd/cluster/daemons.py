"""Ray's own processes. A call into Ray while one of them is dead, or suspended by SIGSTOP, would wait past every deadline."""

from __future__ import annotations

import contextlib
import subprocess
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

import psutil

from opd.cluster.errors import LostValue, WorkerDied
from opd.cluster.pulse import LOOK_S, SILENT_S


def refuse_dead_ray() -> None:
    """Refuse to ask Ray for anything once one of its own processes is gone. Raises: WorkerDied.

    Ray would let the driver wait for a minute, and then end the driver's process.
    """
    for kind, process in _list_daemons():
        if process.poll() is not None:
            raise WorkerDied(f"Ray itself is gone: its {kind} ended with status {process.returncode}")


@contextmanager
def convert_ray_errors() -> Iterator[None]:
    """Surround a call into Ray.

    Raises: WorkerDied if Ray's own processes are gone, and for any error of Ray's that has no other meaning here; LostValue if a
    node is gone, and with it the value that was asked for. Ray's errors for an exception in a worker, a dead worker and a deadline
    pass as they are: whoever waits tells them apart (`opd.cluster.waiting`).
    """
    import ray

    try:
        yield
    except (ray.exceptions.RayTaskError, ray.exceptions.RayActorError, ray.exceptions.GetTimeoutError):
        raise  # before `RayError` below, of which they are kinds
    except ray.exceptions.ObjectLostError as error:
        refuse_dead_ray()  # if Ray itself is gone, that is the error to raise
        raise LostValue(f"a value is lost with the node that had it: {str(error).strip()[:500]}") from None
    except (ray.exceptions.RayError, ConnectionError) as error:
        raise WorkerDied(f"Ray itself is gone: {str(error).strip()[:500]}") from None


@contextmanager
def kill_suspended_daemons() -> Iterator[None]:
    """Watch Ray's own processes from a thread until the block ends, and kill one that has been suspended for `SILENT_S` seconds.

    A call into Ray may wait for a suspended process whatever its deadline is; it ends when that process is dead.
    """
    finished = threading.Event()

    def watch_daemons() -> None:
        looks: Counter[int] = Counter()
        """Pid -> how many looks in a row have found it suspended."""
        while not finished.wait(LOOK_S):
            for _, process in _list_daemons():
                with contextlib.suppress(psutil.NoSuchProcess):
                    is_suspended = psutil.Process(process.pid).status() == psutil.STATUS_STOPPED
                    looks[process.pid] = looks[process.pid] + 1 if is_suspended else 0
                    if looks[process.pid] * LOOK_S > SILENT_S:
                        process.kill()

    thread = threading.Thread(target=watch_daemons, daemon=True, name="daemons")
    thread.start()
    try:
        yield
    finally:
        finished.set()
        thread.join()


def _list_daemons() -> list[tuple[str, subprocess.Popen[bytes]]]:
    """Return kind and process of Ray's `gcs_server` and `raylet`, if this driver started them.

    Those of a cluster that was joined by its address were not started here, so nothing in this module watches them.
    """
    import ray

    # Private, as of Ray 2.60: there is no public way to these processes.
    node = ray._private.worker._global_node
    started = {} if node is None else node.all_processes
    return [(kind, info.process) for kind in ("gcs_server", "raylet") for info in list(started.get(kind, ()))]
