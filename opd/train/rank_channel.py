"""A rank's end of a direct push (`opd.transfer`): gather, fill a buffer, and send it while the next is filled."""

from __future__ import annotations

from collections import deque
from socket import socket
from typing import Any

import torch
from torch import Tensor

from opd.machine.network import open_listener
from opd.models.buckets import Bucket, BucketSlot
from opd.train.export import FileTensors, plan_parts
from opd.transfer.channel import (
    BroadcastGroup,
    Signals,
    TransferBroken,
    name_filled_signal,
    name_taken_signal,
    open_store,
)
from opd.transfer.handles import export_buffer, find_memory_id
from opd.transfer.routes import SENDER, MeetingPoint, PushPlan

BUFFERS = 2
"""Buffers of a rank that sends: it fills one while the other is on its way."""


class RankChannel:
    """A trainer rank's end of the channel to the engines.

    Every rank takes part in every gather. Rank 0 broadcasts; a rank on whose GPU an engine's process lies hands its own copy to that
    process. So weights that were gathered may be dropped at once: what is on its way lies in a buffer of ours.
    """

    def __init__(self, rank: int, device: torch.device) -> None:
        self._rank = rank
        self._device = device
        self._listener: socket | None = None
        self._signals: Signals | None = None
        self._group: BroadcastGroup | None = None
        self._processes: tuple[int, ...] = ()
        """Numbers of the engines' processes that read this rank's buffers."""
        self._buffers: list[Tensor] = []
        self._kept: list[Bucket] = []

    @property
    def memory_id(self) -> str:
        """Id of the GPU that this rank is on: see `find_memory_id`."""
        return find_memory_id(self._device)

    def listen(self, address: str) -> int:
        """Listen on a free port of `address`; `join` serves the channel's signals there. Rank 0 alone does this. Returns the port."""
        self._listener = open_listener(address)
        return int(self._listener.getsockname()[1])

    def join(self, meeting: MeetingPoint, processes: tuple[int, ...]) -> str:
        """Join a channel in which these processes read this rank's buffers. Returns the reason if that fails; else an empty text."""
        self._leave_group()
        self._signals = None
        self._processes = processes
        is_sender = self._rank == SENDER
        if not is_sender and not processes:
            return ""
        try:
            self._signals = Signals(open_store(meeting, self._listener), meeting.timeout_s)
            if is_sender and meeting.group_size > 1:
                self._group = BroadcastGroup(self._signals, meeting, SENDER, self._device)
        except TransferBroken as error:
            self._leave_group()
            return str(error)
        finally:
            self._listener = None
        return ""

    def plan(self, tensors: FileTensors, nbytes: int) -> tuple[PushPlan, dict[int, tuple[bytes, ...]]]:
        """Plan a push in buckets of about `nbytes`, and make this rank's buffers. Returns the plan, which is the same on all ranks, and
        the handles to the buffers, by the number of the process that reads them."""
        self._tensors, self._parts = tensors, plan_parts(tensors, nbytes)
        plan = PushPlan(whole=tensors.complete, buckets=tuple(slots for part in self._parts for slots in part.buckets))
        if self._group or self._processes or self._rank == SENDER:
            size = max(plan.sizes)
            self._buffers = [torch.empty(size, dtype=torch.uint8, device=self._device) for _ in range(BUFFERS)]
        # torch counts how often a buffer is opened, so every process has exports of its own.
        return plan, {process: tuple(map(export_buffer, self._buffers)) for process in self._processes}

    def send(self, number: int, *, keeps: bool) -> str:
        """Gather all buckets of the plan in step with the other ranks, and send them. With `keeps`, rank 0 also copies them into the
        host's memory until the next push.

        Returns the reason why not all were sent; else an empty text. The rest is gathered all the same, because the other ranks gather
        with this one.
        """
        sending = _Sending(self._signals, self._group, self._processes, self._buffers, number)
        self._kept = []
        keeps = keeps and self._rank == SENDER
        for part in self._parts:
            # There is a single group, or a single bucket.
            for group in part.groups:
                with self._tensors.gather_group(group):
                    if not self._buffers or (sending.problem and not keeps):
                        continue
                    values = self._tensors.group_tensors(group)
                    for slots in part.buckets:
                        if group is part.groups[0]:
                            sending.claim_buffer()
                        for slot in slots:
                            if slot.name in values:
                                slot.view(sending.buffer).copy_(values[slot.name])
                        if group is part.groups[-1]:
                            if keeps:
                                self._kept.append(_copy_bucket(slots, sending.buffer))
                            sending.send_buffer(slots[-1].end)
        sending.finish()
        self._buffers = []
        if self._processes and self._device.type == "cuda":
            torch.cuda.ipc_collect()  # frees the buffers, which no process has open any more
        if sending.problem:
            self._leave_group()
        return sending.problem

    def kept_bucket(self, index: int) -> Bucket:
        """Return a bucket of the last push that was kept."""
        return self._kept[index]

    def _leave_group(self) -> None:
        """Leave the broadcasting group, if this rank is in one. Rank 0 goes on to serve the signals, by which the others give up."""
        if self._group:
            self._group.close()
        self._group = None


class _Sending:
    """The buckets of one push on their way out of a rank. Once something failed, `problem` says what, and nothing else is sent."""

    def __init__(
        self,
        signals: Signals | None,
        group: BroadcastGroup | None,
        processes: tuple[int, ...],
        buffers: list[Tensor],
        number: int,
    ) -> None:
        self._signals = signals
        self._group = group
        self._processes = processes
        self._buffers = buffers
        self._number = number
        self._index = 0
        """Index of the bucket that is filled next."""
        self._under_way: deque[tuple[int, Any]] = deque()
        """Index and broadcast of each bucket that was sent and whose buffer may still be read."""
        self.problem = "" if signals or not buffers else "this rank is in no channel"

    @property
    def buffer(self) -> Tensor:
        """The buffer of the bucket that is being filled, uint8 [bytes]."""
        return self._buffers[self._index % len(self._buffers)]

    def claim_buffer(self) -> None:
        """Wait until nobody reads the buffer of the next bucket any more."""
        while self._under_way and self._under_way[0][0] <= self._index - len(self._buffers):
            self._finish_oldest()

    def send_buffer(self, nbytes: int) -> None:
        """Send the first `nbytes` bytes of the buffer, which is filled."""
        if not self.problem:
            if self.buffer.is_cuda:
                torch.cuda.current_stream().synchronize()  # other processes read it as soon as they are told
            try:
                operation = self._group.begin(self.buffer[:nbytes]) if self._group else None
                self._under_way.append((self._index, operation))
                for process in self._processes:
                    assert self._signals is not None
                    self._signals.post(name_filled_signal(self._number, self._index, process))
            except TransferBroken as error:
                self.problem = str(error)
        self._index += 1

    def finish(self) -> None:
        """Wait until all buckets have arrived."""
        while self._under_way:
            self._finish_oldest()

    def _finish_oldest(self) -> None:
        index, operation = self._under_way.popleft()
        if self.problem:
            return
        try:
            if self._group:
                self._group.finish(operation)
            for process in self._processes:
                assert self._signals is not None
                self._signals.take(name_taken_signal(self._number, index, process))
        except TransferBroken as error:
            self.problem = str(error)


def _copy_bucket(slots: tuple[BucketSlot, ...], buffer: Tensor) -> Bucket:
    """Copy a bucket into the host's memory; out of a GPU as fast as the bus is, because the pages cannot be moved meanwhile."""
    data = torch.empty(slots[-1].end, dtype=torch.uint8, pin_memory=buffer.is_cuda)
    data.copy_(buffer[: len(data)])
    return Bucket(slots, data.numpy())
