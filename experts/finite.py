"""Weights that hold a NaN or an infinity, found at registration, through a memory map and without torch."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from experts.model_dir import Tensor, read_header
from opd.errors import ModelError

CHUNK = 1 << 24
"""Numbers looked at together: bounds the temporaries, whatever the tensor's size."""

_EXPONENTS = {
    "F16": (np.uint16, 0x7C00),
    "BF16": (np.uint16, 0x7F80),
    "F32": (np.uint32, 0x7F80_0000),
    "F64": (np.uint64, 0x7FF0_0000_0000_0000),
}
"""Exponent bits: all of them are set in a NaN or an infinity, and in no other number."""


def check_finite(path: Path, names: list[str]) -> None:
    """Look at every number of these safetensors files. Raises: ModelError naming the first tensor that is not finite."""
    for file in (path / name for name in names):
        data = np.memmap(file, dtype=np.uint8, mode="r")
        tensors = read_header(file)
        start = len(data) - max((t.data_offsets[1] for t in tensors.values()), default=0)
        for name, tensor in tensors.items():
            bad = _not_finite(data[start:], tensor)
            if bad:
                raise ModelError.at(
                    f"{file}: tensor `{name}`",
                    found=f"{bad} of {tensor.numel} numbers are NaN or infinite",
                    wanted="finite weights",
                    fix="take an earlier checkpoint of the training that made it, or copy the file again",
                )


def _not_finite(data: np.ndarray, tensor: Tensor) -> int:
    """How many; 0 for types that have no such numbers, and for those that only quantised models use."""
    if tensor.dtype not in _EXPONENTS:
        return 0
    kind, exponent = _EXPONENTS[tensor.dtype]
    bits = data[slice(*tensor.data_offsets)].view(kind)
    parts = (bits[i : i + CHUNK] for i in range(0, len(bits), CHUNK))
    return sum(int(np.count_nonzero((part & kind(exponent)) == exponent)) for part in parts)
