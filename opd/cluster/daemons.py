"""Ray's own processes. A call into Ray while one of them is dead or stopped would wait past every deadline."""

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

    Raises: WorkerDied if Ray's own processes are gone, whichever error Ray has for that; LostValue if a node is gone, and with it
    what was asked for.
    """
    import ray

    try:
        yield
    except (ray.exceptions.RayTaskError, ray.exceptions.RayActorError, ray.exceptions.GetTimeoutError):
        raise
    except ray.exceptions.ObjectLostError as error:
        refuse_dead_ray()  # that would be why
        raise LostValue(f"a value is lost with the node that had it: {str(error).strip()[:500]}") from None
    except (ray.exceptions.RayError, ConnectionError) as error:
        raise WorkerDied(f"Ray itself is gone: {str(error).strip()[:500]}") from None


@contextmanager
def kill_stopped_daemons() -> Iterator[None]:
    """Kill a process of Ray that was stopped for `SILENT_S`, from a thread, until the block ends.

    A call into Ray may wait for a stopped process whatever its deadline is; it ends when that process is dead.
    """
    finished = threading.Event()

    def watch_daemons() -> None:
        stopped: Counter[int] = Counter()
        while not finished.wait(LOOK_S):
            for _, process in _list_daemons():
                with contextlib.suppress(psutil.NoSuchProcess):
                    still = psutil.Process(process.pid).status() == psutil.STATUS_STOPPED
                    stopped[process.pid] = stopped[process.pid] + 1 if still else 0
                    if stopped[process.pid] * LOOK_S > SILENT_S:
                        process.kill()

    thread = threading.Thread(target=watch_daemons, daemon=True, name="daemons")
    thread.start()
    try:
        yield
    finally:
        finished.set()
        thread.join()


def _list_daemons() -> list[tuple[str, subprocess.Popen[bytes]]]:
    """Return kind and process of each of Ray's own processes that this driver started."""
    import ray

    node = ray._private.worker._global_node
    started = {} if node is None else node.all_processes
    return [(kind, info.process) for kind in ("gcs_server", "raylet") for info in list(started.get(kind, ()))]
