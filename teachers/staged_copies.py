"""Copies from mapped files to a GPU through pinned memory.

A GPU copies from pinned memory by itself, and from other memory only what its driver has brought there piece by piece.
"""

from __future__ import annotations

import torch
from torch import Tensor

STAGE_BYTES = 64 << 20
"""Bytes of each of the two buffers."""


class StagedCopies:
    """Copies tensors through two buffers: the CPU fills one while the GPU empties the other. For one thread at a time."""

    def __init__(self, device: torch.device, nbytes: int = STAGE_BYTES) -> None:
        self._device = device
        self._is_gpu = device.type == "cuda"
        self._buffers = [torch.empty(nbytes, dtype=torch.uint8, pin_memory=self._is_gpu) for _ in range(2)]
        self._emptied: list[torch.cuda.Event | None] = [None, None]
        """For each buffer an event that comes when the GPU has copied what was in it last."""

    def copy(self, tensor: Tensor) -> Tensor:
        """Return a copy on the device. What is submitted to the current stream after this finds it complete."""
        copied = torch.empty(tensor.shape, dtype=tensor.dtype, device=self._device)
        source, target = (t.view(-1).view(torch.uint8) for t in (tensor.contiguous(), copied))
        for start in range(0, len(source), len(self._buffers[0])):
            piece = source[start : start + len(self._buffers[0])]
            buffer, emptied = self._buffers.pop(0), self._emptied.pop(0)
            if emptied is not None:
                emptied.synchronize()
            buffer[: len(piece)].copy_(piece)
            target[start : start + len(piece)].copy_(buffer[: len(piece)], non_blocking=True)
            self._buffers.append(buffer)
            self._emptied.append(torch.cuda.current_stream(self._device).record_event() if self._is_gpu else None)
        return copied
