"""The end of a direct push (`opd.transfer`) in one process of an engine."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from opd.transfer.channel import BroadcastGroup, Signals, name_filled_signal, name_taken_signal, open_store
from opd.transfer.handles import open_buffer
from opd.transfer.routes import DirectPush, MeetingPoint, Route


class EngineChannel:
    """The channel through which new weights come into this process."""

    def __init__(self, meeting: MeetingPoint, route: Route, device: torch.device) -> None:
        """Join the channel; all of its processes do so at once. Raises: TransferBroken."""
        self._route = route
        self._device = device
        self._signals = Signals(open_store(meeting), meeting.timeout_s)
        self._group = (
            None if route.group_rank is None else BroadcastGroup(self._signals, meeting, route.group_rank, device)
        )

    def take_buckets(self, push: DirectPush) -> Iterator[list[tuple[str, Tensor]]]:
        """Yield names and values of the tensors of each bucket, on this process's device.

        vLLM keeps them until a layer is complete, so every bucket lies in memory of its own. Taking raises: TransferBroken.
        """
        process = self._route.process
        # The buffers of the rank on this process's GPU; none if the rank broadcasts.
        buffers = [open_buffer(handle, self._device) for handle in push.handles.get(process, ())]
        for index, (slots, nbytes) in enumerate(zip(push.plan.buckets, push.plan.sizes, strict=True)):
            data = torch.empty(nbytes, dtype=torch.uint8, device=self._device)
            if self._group is not None:
                self._group.finish(self._group.begin(data))
            else:
                self._signals.take(name_filled_signal(push.number, index, process))
                data.copy_(buffers[index % len(buffers)][:nbytes])
                if data.is_cuda:
                    torch.cuda.current_stream().synchronize()  # after the signal the rank fills its buffer again
                if index == len(push.plan.buckets) - 1:
                    buffers.clear()  # after the last signal the rank frees its buffers
                self._signals.post(name_taken_signal(push.number, index, process))
            yield [(slot.name, slot.view(data)) for slot in slots]

    def close(self) -> None:
        """Leave the channel."""
        if self._group is not None:
            self._group.close()
