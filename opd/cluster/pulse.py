"""A worker's pulse: every `LOOK_S` it writes a count into Ray's key-value store, and whoever waits reads it there."""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import threading
import time
from dataclasses import dataclass
from typing import Any

from opd.machine.compiler import keep_compiled_code_private

LOOK_S = 2.0
"""How often a worker says that it lives, and how often whoever waits looks."""
SILENT_S = 40.0
"""A worker that has not said so for this long is hung, whatever it was doing: it is killed."""
NAMESPACE = "opd"
"""Where in the key-value store the pulses are."""


class PulsingWorker:
    """The first base of a worker's class: a thread of its own says that the process lives."""

    def __init__(self, key: bytes, *args: Any) -> None:
        keep_compiled_code_private()
        threading.Thread(target=_write_pulse, args=(key,), daemon=True, name="pulse").start()
        super().__init__(*args)

    def node_address(self) -> str:
        """Return the address at which the cluster's other machines reach the one that this worker runs on."""
        import ray

        address: str = ray.util.get_node_ip_address()
        return address

    def node_id(self) -> str:
        """Return Ray's id of the node that this worker runs on."""
        import ray

        node: str = ray.get_runtime_context().get_node_id()
        return node


def _write_pulse(key: bytes) -> None:
    import ray
    from ray.experimental.internal_kv import _internal_kv_put

    process = f"{os.getpid()} {ray.util.get_node_ip_address()}"
    for count in itertools.count():
        _internal_kv_put(key, f"{count} {process}".encode(), overwrite=True, namespace=NAMESPACE)
        time.sleep(LOOK_S)


@dataclass
class Pulse:
    """A worker as the driver hears it."""

    key: bytes
    """Key under which the store has what it says."""
    last: bytes = b""
    """What it said last: a count, its pid and its machine."""
    silent_s: float = 0.0
    """How long the driver has listened and heard nothing new."""
    looked_at: float = 0.0
    """When the driver looked last, by the monotonic clock."""
    ended: str = ""
    """The reason, if the worker was killed because it fell silent, for whoever waits for it; else empty."""

    @property
    def is_local(self) -> bool:
        """True if the worker is on this machine. Needs its first pulse: `last` must not be empty."""
        import ray

        address: str = ray.util.get_node_ip_address()
        return self.last.decode().split()[2] == address

    @property
    def pid(self) -> str:
        """Number of the worker's process, once it has spoken."""
        return self.last.decode().split()[1]

    def record_message(self, message: bytes, now: float) -> None:
        """Take what the store has now, at the time `now` by the monotonic clock."""
        if message != self.last:
            self.last, self.silent_s = message, 0.0
        else:
            # Only while the driver listened: all processes may have slept, after Ctrl-Z or in a container that was paused.
            self.silent_s += min(now - self.looked_at, 2 * LOOK_S)
        self.looked_at = now

    def kill_process(self) -> None:
        """Send SIGKILL if the worker runs on this machine: a process that is stopped does not hear Ray."""
        if self.is_local:
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(self.pid), signal.SIGKILL)
