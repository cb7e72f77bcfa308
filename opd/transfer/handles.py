"""A buffer that a process on the same GPU reads without a copy through the host."""

from __future__ import annotations

import pickle
from multiprocessing.reduction import ForkingPickler

import torch
from torch import Tensor
from torch.multiprocessing import reductions

DEVICE_ARGUMENT = 6
"""Index of the device's number in the arguments with which torch opens memory of CUDA in another process."""


def find_memory_id(device: torch.device) -> str:
    """Return the id of the GPU that has a device's memory, the same in every process; empty for the CPU, where nothing is shared."""
    return str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else ""


def export_buffer(buffer: Tensor) -> bytes:
    """Return the handle with which another process opens the buffer, once for each export. The buffer has to live until then."""
    # torch reads its own message; it never leaves the run's processes.
    return bytes(ForkingPickler.dumps(reductions.reduce_tensor(buffer)))


def open_buffer(handle: bytes, device: torch.device) -> Tensor:
    """Return the exporting process's buffer, whose memory this process sees as its `device`'s."""
    rebuild, arguments = pickle.loads(handle)
    if rebuild is reductions.rebuild_cuda_tensor:
        # The same GPU may have another number in this process.
        arguments = (*arguments[:DEVICE_ARGUMENT], device.index or 0, *arguments[DEVICE_ARGUMENT + 1 :])
    tensor: Tensor = rebuild(*arguments)
    return tensor
