"""Find NaNs and infinities in weights when an expert is registered, through a memory map and without torch."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from experts.safetensors_header import Tensor, read_header
from opd.errors import ModelError

if TYPE_CHECKING:
    import numpy as np

CHUNK = 1 << 24
"""Numbers checked at a time, so that temporary arrays stay small however large the tensor is."""

_EXPONENTS = {
    "F16": ("<u2", 0x7C00),
    "BF16": ("<u2", 0x7F80),
    "F32": ("<u4", 0x7F80_0000),
    "F64": ("<u8", 0x7FF0_0000_0000_0000),
}
"""Type -> integer type of the same size, and the bits of the exponent. A number is NaN or infinite exactly if all of these
bits are set."""


def check_finite(path: Path, names: list[str]) -> None:
    """Check every number of these safetensors files. Raises: ModelError naming the first tensor that is not finite."""
    import numpy as np

    for file in (path / name for name in names):
        data = np.memmap(file, dtype=np.uint8, mode="r")
        tensors = read_header(file)
        # Offsets count from the end of the header, and the last tensor ends with the file.
        start = len(data) - max((t.data_offsets[1] for t in tensors.values()), default=0)
        for name, tensor in tensors.items():
            count = _count_not_finite(data[start:], tensor)
            if count:
                raise ModelError.at(
                    f"{file}: tensor `{name}`",
                    found=f"{count} of {tensor.numel} numbers are NaN or infinite",
                    wanted="finite weights",
                    fix="take an earlier checkpoint of the training that made it, or copy the file again",
                )


def _count_not_finite(data: np.ndarray, tensor: Tensor) -> int:
    """Return how many numbers are NaN or infinite. It is 0 for integers, and for types that only quantised models use."""
    import numpy as np

    if tensor.dtype not in _EXPONENTS:
        return 0
    kind, bits = _EXPONENTS[tensor.dtype]
    exponent = np.dtype(kind).type(bits)
    # Read as integers, because numpy has no bfloat16, and only the bits matter.
    numbers = data[slice(*tensor.data_offsets)].view(kind)
    parts = (numbers[i : i + CHUNK] for i in range(0, len(numbers), CHUNK))
    return sum(int(np.count_nonzero((part & exponent) == exponent)) for part in parts)
