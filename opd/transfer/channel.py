"""A channel between the trainer's ranks and the processes of the engines: signals, and a group in which rank 0 broadcasts.

Every wait has a deadline and ends early if the channel is given up: whoever learns that a process died says so to all others. NCCL itself
would wait for ever. A channel that was given up is closed; the next push opens a new one.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from socket import create_connection, socket
from typing import Any

import torch
from torch import Tensor

from opd.errors import RunError
from opd.machine.network import find_network_device
from opd.transfer.routes import SENDER, MeetingPoint

GIVEN_UP = "given up"
"""Key that is in the store once the channel is given up."""
GIVE_UP_S = 5.0
"""Seconds that are spent on reaching rank 0 to give a channel up."""
PAUSE_S, LOOK_S = 0.0002, 0.05
"""Seconds between two looks at what is waited for, and at `GIVEN_UP`, which lies in another process."""


def name_filled_signal(push: int, bucket: int, process: int) -> str:
    """Return the name of the signal that a bucket lies in the buffer that this process reads."""
    return f"push {push} bucket {bucket} filled {process}"


def name_taken_signal(push: int, bucket: int, process: int) -> str:
    """Return the name of the signal that this process has copied a bucket."""
    return f"push {push} bucket {bucket} taken {process}"


class TransferBroken(RunError):
    """A transfer that cannot go on: another process is gone, late, or gave up."""


def open_store(meeting: MeetingPoint, listener: socket | None = None) -> Any:
    """Return torch's store at the meeting point; `listener` is the socket of the process that serves it. Raises: TransferBroken."""
    from torch import distributed

    serves: dict[str, Any] = {"is_master": True, "master_listen_fd": listener.detach()} if listener else {}
    timeout = timedelta(seconds=meeting.timeout_s)
    try:
        return distributed.TCPStore(meeting.address, meeting.port, timeout=timeout, wait_for_workers=False, **serves)
    except RuntimeError as error:  # torch has no narrower class for a connection that fails
        raise TransferBroken(f"no connection to {meeting.address}:{meeting.port}: {error}") from None


def give_up(meeting: MeetingPoint) -> None:
    """Have all processes that wait in the channel give up. If rank 0, which serves the signals, is gone, they notice that themselves."""
    try:
        # torch's own attempt at a port that nobody serves goes on for as long as it may, and prints pages.
        create_connection((meeting.address, meeting.port), timeout=GIVE_UP_S).close()
        open_store(replace(meeting, timeout_s=GIVE_UP_S)).set(GIVEN_UP, "1")
    except (OSError, RuntimeError):  # the second is torch's, if the store is lost in between
        return


class Signals:
    """Signals between the processes of a channel. Each is posted once, and taken by one process."""

    def __init__(self, store: Any, timeout_s: float) -> None:
        self.store = store
        self._timeout_s = timeout_s

    def post(self, name: str) -> None:
        """Let a process go on that waits for this signal. Raises: TransferBroken."""
        self._ask(lambda: self.store.set(name, "1"))

    def take(self, name: str) -> None:
        """Wait for a signal, and forget it. Raises: TransferBroken."""
        self.wait_until(lambda: bool(self.store.check([name])), name)
        self._ask(lambda: self.store.delete_key(name))

    def wait_until(self, is_done: Callable[[], bool], name: str) -> None:
        """Wait until `is_done` is true. Raises: TransferBroken past the deadline, or if the channel was given up."""
        now = time.monotonic()
        deadline, looks_at = now + self._timeout_s, now + LOOK_S
        while not self._ask(is_done):
            time.sleep(PAUSE_S)
            now = time.monotonic()
            if now > deadline:
                raise TransferBroken(f"waited {self._timeout_s:.0f} s for {name}")
            if now > looks_at:
                looks_at = now + LOOK_S
                if self._ask(lambda: self.store.check([GIVEN_UP])):
                    raise TransferBroken(f"another process was lost, {name} was waited for")

    @staticmethod
    def _ask(question: Callable[[], Any]) -> Any:
        try:
            return question()
        except RuntimeError as error:  # torch's error of a lost connection
            raise TransferBroken(str(error).splitlines()[0]) from None


class BroadcastGroup:
    """The processes to which rank 0 broadcasts, itself included: NCCL on GPUs, gloo on the CPU."""

    def __init__(self, signals: Signals, meeting: MeetingPoint, rank: int, device: torch.device) -> None:
        """Join the group; all processes of it do so at once. Raises: TransferBroken."""
        self._signals = signals
        # A backend that waits for a process that never comes looks at no signal, so all say first that they are here.
        signals.post(f"here {rank}")
        everyone = [f"here {other}" for other in range(meeting.group_size)]
        signals.wait_until(lambda: bool(signals.store.check(everyone)), "all processes of the group")
        try:
            self._backend = _make_backend(signals.store, meeting, rank, device)
        except RuntimeError as error:
            raise TransferBroken(f"the group cannot be made: {str(error).splitlines()[0]}") from None
        if device.type == "cuda":  # NCCL connects in the first operation
            self.finish(self.begin(torch.zeros(1, dtype=torch.uint8, device=device)))

    def begin(self, buffer: Tensor) -> Any:
        """Begin to broadcast `buffer` on rank 0, or to receive it elsewhere. It must live until `finish` has returned. Returns the
        operation. Raises: TransferBroken."""
        from torch import distributed

        options = distributed.BroadcastOptions()
        options.rootRank = SENDER
        try:
            return self._backend.broadcast([buffer], options)
        except RuntimeError as error:
            raise TransferBroken(str(error).splitlines()[0]) from None

    def finish(self, operation: Any) -> None:
        """Wait for an operation. Raises: TransferBroken."""
        self._signals.wait_until(operation.is_completed, "a broadcast")
        try:
            operation.wait()
        except RuntimeError as error:
            raise TransferBroken(str(error).splitlines()[0]) from None

    def close(self) -> None:
        """Leave the group; operations that are under way fail."""
        self._backend.abort()
        # The end of gloo's object waits for what is under way, as long as a process that takes nothing keeps its connection.
        last_reference = [self._backend]
        del self._backend
        threading.Thread(target=last_reference.clear, daemon=True, name="end of a group").start()


def _make_backend(store: Any, meeting: MeetingPoint, rank: int, device: torch.device) -> Any:
    """Return torch's process group, which is not among those that the process has by name. The process may have a group of its own: a
    trainer's ranks, or the parts of an engine."""
    from torch import distributed

    group_store = distributed.PrefixStore("group", store)
    # Longer than our own deadline: torch would end the whole process when its deadline passes.
    timeout = timedelta(seconds=2 * meeting.timeout_s)
    if device.type == "cuda":
        options = distributed.ProcessGroupNCCL.Options()
        options._timeout = timeout
        return distributed.ProcessGroupNCCL(group_store, rank, meeting.group_size, options)
    gloo: Any = distributed.ProcessGroupGloo  # torch's stubs have another name for its options
    options = gloo._Options()
    options._timeout = timeout
    options._devices = [gloo.create_device(interface=find_network_device(meeting.address))]
    return gloo(group_store, rank, meeting.group_size, options)
