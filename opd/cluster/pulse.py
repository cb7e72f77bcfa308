"""The pulse of a worker: every `LOOK_S` seconds it writes a count into Ray's key-value store, where the driver reads it while it waits."""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import threading
import time
from dataclasses import dataclass
from typing import Any

from opd.cluster.environment import VISIBLE_GPUS
from opd.machine.compiler import keep_compiled_code_private

LOOK_S = 2.0
"""Seconds between two beats of a worker's pulse, and between two looks of the driver."""
SILENT_S = 40.0
"""A worker without a beat for so many seconds counts as hung, whatever it is doing, and is killed."""
NAMESPACE = "opd"
"""Namespace of the pulses in the key-value store."""


class PulsingWorker:
    """First base class of every worker's class: it starts a thread that writes the pulse."""

    def __init__(self, key: bytes, *args: Any) -> None:
        keep_compiled_code_private()
        if VISIBLE_GPUS in os.environ:
            os.environ["CUDA_VISIBLE_DEVICES"] = os.environ[VISIBLE_GPUS]
        threading.Thread(target=_write_pulse, args=(key,), daemon=True, name="pulse").start()
        super().__init__(*args)

    def node_address(self) -> str:
        """Return the address at which other machines of the cluster reach this worker's machine."""
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
    """The driver's knowledge of one worker's pulse."""

    key: bytes
    """Key of the worker in the key-value store."""
    last_message: bytes = b""
    """The last message that was read: count, process id and address of the machine. Empty before the first one."""
    silent_s: float = 0.0
    """Seconds for which the driver has listened without a new message."""
    looked_at: float = 0.0
    """Time of the driver's last look, by the monotonic clock."""
    kill_reason: str = ""
    """The reason why the worker was killed, if it was silent or did not start in time; else empty. Errors show it."""

    @property
    def is_local(self) -> bool:
        """True if the worker is on this machine. Its first message must have come: `last_message` must not be empty."""
        import ray

        address: str = ray.util.get_node_ip_address()
        return self.last_message.decode().split()[2] == address

    @property
    def pid(self) -> str:
        """Id of the worker's process. Its first message must have come: `last_message` must not be empty."""
        return self.last_message.decode().split()[1]

    def record_message(self, message: bytes, now: float) -> None:
        """Note the message that the store has at the time `now`, by the monotonic clock."""
        if message != self.last_message:
            self.last_message, self.silent_s = message, 0.0
        else:
            # At most two intervals count at a time: if the driver did not look for longer, all processes may have been suspended,
            # by Ctrl-Z or in a paused container.
            self.silent_s += min(now - self.looked_at, 2 * LOOK_S)
        self.looked_at = now

    def kill_process(self) -> None:
        """Send SIGKILL if the worker runs on this machine: a suspended process does not react to Ray."""
        if self.is_local:
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(self.pid), signal.SIGKILL)
