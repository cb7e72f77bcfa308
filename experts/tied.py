"""Refuse a model whose config says that its output head is its embedding, and whose files hold another head.

vLLM follows the config and leaves the head out. transformers 5 takes it, with a warning. Engine and trainer would compute different
distributions; a merge would notice in its first step, minutes later.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from experts.safetensors_header import Tensor, data_start, read_header
from opd.errors import ModelError

if TYPE_CHECKING:
    import numpy as np

CHUNK = 1 << 26
"""Bytes compared at a time."""


def refuse_other_head(path: Path, shards: list[Path], names: tuple[str, str]) -> None:
    """`names`: of embedding and head, which the shards hold. Raises: ModelError if they are not the same numbers."""
    places = {name: (shard, tensor) for shard in shards for name, tensor in _select_tensors(shard, names).items()}
    if not _are_equal(*(places[name] for name in names)):
        raise ModelError.at(
            f"{path / 'config.json'}: tie_word_embeddings",
            found=f"true, and a `{names[1]}` that differs from `{names[0]}`",
            wanted="one of the two: vLLM would leave the head out, and transformers would take it",
            fix="set it to false if the head was trained; else load the model, call tie_weights(), and save it again",
        )


def _select_tensors(shard: Path, names: tuple[str, str]) -> Mapping[str, Tensor]:
    return {name: tensor for name, tensor in read_header(shard).items() if name in names}


def _are_equal(one: tuple[Path, Tensor], other: tuple[Path, Tensor]) -> bool:
    if (one[1].dtype, one[1].shape) != (other[1].dtype, other[1].shape):
        return False
    left, right = _read_bytes(*one), _read_bytes(*other)
    return all((left[i : i + CHUNK] == right[i : i + CHUNK]).all() for i in range(0, len(left), CHUNK))


def _read_bytes(shard: Path, tensor: Tensor) -> np.ndarray:
    import numpy as np

    first, end = tensor.data_offsets
    return np.memmap(shard, dtype=np.uint8, mode="r", offset=data_start(shard) + first, shape=(end - first,))
