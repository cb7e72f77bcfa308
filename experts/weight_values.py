"""Check the numbers of weights through a memory map and without torch: none is NaN or infinite, and a tied head is the embedding."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from experts.safetensors_header import Tensor, data_start, read_header
from opd.errors import ModelError

if TYPE_CHECKING:
    import numpy as np

CHUNK = 1 << 26
"""Bytes looked at a time, so that temporary arrays stay small however large the tensor is."""

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
    for file in (path / name for name in names):
        for name, tensor in read_header(file).items():
            count = _count_not_finite(file, tensor)
            if count:
                raise ModelError.at(
                    f"{file}: tensor `{name}`",
                    found=f"{count} of {tensor.numel} numbers are NaN or infinite",
                    wanted="finite weights",
                    fix="take an earlier checkpoint of the training that made it, or copy the file again",
                )


def _count_not_finite(file: Path, tensor: Tensor) -> int:
    """Return how many numbers are NaN or infinite. It is 0 for integers, and for types that only quantised models use."""
    import numpy as np

    if tensor.dtype not in _EXPONENTS:
        return 0
    kind, bits = _EXPONENTS[tensor.dtype]
    exponent = np.dtype(kind).type(bits)
    data = _map_bytes(file, tensor)
    # Read as integers, because numpy has no bfloat16, and only the bits matter.
    parts = (data[i : i + CHUNK].view(kind) for i in range(0, len(data), CHUNK))
    return sum(int(np.count_nonzero((part & exponent) == exponent)) for part in parts)


def refuse_other_head(path: Path, shards: list[Path], names: tuple[str, str]) -> None:
    """Refuse a head that differs from the embedding, where the config says that they are one. `names`: their tensors, which the
    shards hold.

    vLLM follows the config and ignores the head. transformers 5 uses the head, with a warning. So engine and trainer would compute
    different distributions, which a merge would notice only in its first step, minutes later. Raises: ModelError.
    """
    entries = {name: (shard, tensor) for shard in shards for name, tensor in read_header(shard).items()}
    if not _are_equal(*(entries[name] for name in names)):
        raise ModelError.at(
            f"{path / 'config.json'}: tie_word_embeddings",
            found=f"true, and a `{names[1]}` that differs from `{names[0]}`",
            wanted="one of the two: vLLM would leave the head out, and transformers would take it",
            fix="set it to false if the head was trained; else load the model, call tie_weights(), and save it again",
        )


def _are_equal(embedding: tuple[Path, Tensor], head: tuple[Path, Tensor]) -> bool:
    if (embedding[1].dtype, embedding[1].shape) != (head[1].dtype, head[1].shape):
        return False
    first, second = _map_bytes(*embedding), _map_bytes(*head)
    return all((first[i : i + CHUNK] == second[i : i + CHUNK]).all() for i in range(0, len(first), CHUNK))


def _map_bytes(file: Path, tensor: Tensor) -> np.ndarray:
    import numpy as np

    return np.memmap(file, dtype=np.uint8, mode="r")[data_start(file) :][slice(*tensor.data_offsets)]
