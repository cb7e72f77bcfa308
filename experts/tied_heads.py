"""Refuse a model whose config says that its output head is its embedding, and whose files hold another head.

vLLM follows the config and ignores the head. transformers 5 uses the head, with a warning. So engine and trainer would compute
different distributions, which a merge would notice only in its first step, minutes later.
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
    """Refuse a head that differs from the embedding. `names`: their tensors, which the shards hold. Raises: ModelError."""
    entries = {name: (shard, tensor) for shard in shards for name, tensor in _select_tensors(shard, names).items()}
    if not _are_equal(*(entries[name] for name in names)):
        raise ModelError.at(
            f"{path / 'config.json'}: tie_word_embeddings",
            found=f"true, and a `{names[1]}` that differs from `{names[0]}`",
            wanted="one of the two: vLLM would leave the head out, and transformers would take it",
            fix="set it to false if the head was trained; else load the model, call tie_weights(), and save it again",
        )


def _select_tensors(shard: Path, names: tuple[str, str]) -> Mapping[str, Tensor]:
    return {name: tensor for name, tensor in read_header(shard).items() if name in names}


def _are_equal(embedding: tuple[Path, Tensor], head: tuple[Path, Tensor]) -> bool:
    if (embedding[1].dtype, embedding[1].shape) != (head[1].dtype, head[1].shape):
        return False
    embedding_bytes, head_bytes = _read_bytes(*embedding), _read_bytes(*head)
    return all(
        (embedding_bytes[i : i + CHUNK] == head_bytes[i : i + CHUNK]).all()
        for i in range(0, len(embedding_bytes), CHUNK)
    )


def _read_bytes(shard: Path, tensor: Tensor) -> np.ndarray:
    import numpy as np

    start, end = tensor.data_offsets
    return np.memmap(shard, dtype=np.uint8, mode="r", offset=data_start(shard) + start, shape=(end - start,))
