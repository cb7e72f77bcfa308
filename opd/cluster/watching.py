"""The watch over a session's workers: it listens to their pulses, and kills those that fell silent."""

from __future__ import annotations

import math
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from opd.cluster.daemons import convert_ray_errors, refuse_dead_ray
from opd.cluster.errors import WorkerDied
from opd.cluster.pulse import LOOK_S, NAMESPACE, SILENT_S, Pulse
from opd.text import escape_control_characters

if TYPE_CHECKING:
    from opd.cluster.placement import ReservedSeat
    from opd.cluster.workers import Worker

LOG_LINES = 20
"""Lines of a dead worker's log that an error shows."""


class WorkerWatch:
    """Knows the workers of a session, each from its start until it is killed or has died."""

    def __init__(self, start_timeout_s: float = math.inf) -> None:
        """Begin with no workers. `start_timeout_s`: seconds in which a new worker's first beat has to come."""
        self._workers: dict[bytes, Worker[Any]] = {}
        """Key of a worker's pulse -> worker. Ray ends a worker to which no handle exists, so this keeps all handles."""
        self._start_timeout_s = start_timeout_s
        self.seats: dict[str, ReservedSeat] = {}
        """Name of a worker -> the seat that is reserved for it."""

    @property
    def workers(self) -> list[Worker[Any]]:
        """The workers that are watched now."""
        return list(self._workers.values())

    def add(self, worker: Worker[Any]) -> None:
        """Listen to a worker from now on."""
        self._workers[worker.pulse.key] = worker

    def stop_watching(self, worker: Worker[Any]) -> bool:
        """Stop listening to a worker. Returns True if it was watched until now."""
        return self._workers.pop(worker.pulse.key, None) is not None

    def stop_watching_all(self) -> None:
        """Stop listening to all workers."""
        self._workers.clear()

    def kill_silent_workers(self, awaited_method: str) -> None:
        """Read the pulse of every worker, and kill those that have been silent for `SILENT_S`. A worker whose first beat did not
        come in time is killed too, for example because Ray has no place for it. `awaited_method`: the method whose answer the caller
        waits for.

        All workers are read, not only the one for which the caller waits: that one may itself wait for a silent one, and goes
        on once that is killed. Calls of a killed worker end with WorkerDied. Raises: WorkerDied if Ray is gone.
        """
        if not self._workers:
            return
        from ray.experimental.internal_kv import internal_kv_get_gcs_client

        client = internal_kv_get_gcs_client()
        for worker in self.workers:
            pulse = worker.pulse
            pulse.record_message(_read_pulse(client, pulse.key), time.monotonic())
            has_started = bool(pulse.last_message)
            if pulse.silent_s <= (SILENT_S if has_started else self._start_timeout_s):
                continue
            if has_started:
                waiting = f"(`{awaited_method}` was waited for)"
                pulse.kill_reason = f"no sign of life for {SILENT_S:.0f} s {waiting}; killed{read_log_tail(pulse)}"
            else:
                pulse.kill_reason = self._describe_failed_start(worker)
            worker.kill()

    def _describe_failed_start(self, worker: Worker[Any]) -> str:
        """Describe why a worker without a first beat is killed."""
        seat = self.seats.get(worker.name)
        problem = seat.describe_problem() if seat else ""
        return f"not started after {self._start_timeout_s:.0f} s (cluster.start_timeout_s)" + (
            f": no node has room for it: {problem}" if problem else ""
        )


def _read_pulse(client: Any, key: bytes) -> bytes:
    """Read a worker's pulse from Ray's store; empty if there is none yet.

    Raises: WorkerDied if Ray is gone, or its store does not answer for `SILENT_S`.
    """
    deadline = time.monotonic() + SILENT_S
    while True:
        try:
            # Each call has a short timeout: if the store ends during a call, Ray reports nothing for a minute, and then ends the
            # driver.
            with convert_ray_errors():
                return client.internal_kv_get(key, NAMESPACE.encode(), timeout=LOOK_S) or b""
        except WorkerDied:
            refuse_dead_ray()
            if time.monotonic() > deadline:
                raise
            time.sleep(0.1)  # a store that is ending may refuse at once, and this loop must not spin


def read_log_tail(pulse: Pulse) -> str:
    """Return the last lines of the log of a worker on this machine, and where the log is; empty for a worker on another machine."""
    import ray

    node = ray._private.worker._global_node
    if not pulse.last_message or node is None or not pulse.is_local:
        return ""
    files = sorted(Path(node.get_logs_dir_path()).glob(f"worker-*-{pulse.pid}.*"))
    lines = [line for file in files for line in file.read_text(errors="replace").splitlines() if line.strip()]
    shown = "".join(f"\n  | {escape_control_characters(line)}" for line in lines[-LOG_LINES:])
    return f"\nits last words, in {files[0].parent}:{shown}" if shown else ""
