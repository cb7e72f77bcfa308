"""Weight files of a model, written tensor by tensor, so that nobody has to hold more than one of them.

The files are those that huggingface_hub and safetensors write for the same tensors, byte for byte: one `model.safetensors`,
or shards of up to 5 GB and an index.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import ExitStack
from io import FileIO
from pathlib import Path
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from torch import Tensor

SHARD = "5GB"
"""Largest shard, unless a single tensor is larger."""
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
METADATA = {"format": "pt"}


class ModelFiles:
    """The weight files of a directory while they are being written."""

    def __init__(self, path: Path, tensors: Mapping[str, Tensor], shard: int | None = None) -> None:
        """`tensors` say what will come, without values; their order decides which shard a tensor is in. `shard`: bytes of the
        largest one; default: `SHARD`."""
        from huggingface_hub import split_torch_state_dict_into_shards

        self.path = path
        self._tensors = dict(tensors)
        self._split = split_torch_state_dict_into_shards(self._tensors, max_shard_size=shard or SHARD)
        self._places: dict[str, tuple[FileIO, int]] = {}
        """Name -> file and first byte of a tensor that has not come yet."""

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            for name, members in self._split.filename_to_tensors.items():
                file = stack.enter_context((self.path / name).open("wb", buffering=0))
                header, starts = file_header({member: self._tensors[member] for member in members}, METADATA)
                _write_all(file, memoryview(header))
                self._places |= {member: (file, start) for member, start in starts.items()}
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def write(self, tensors: Mapping[str, Tensor]) -> None:
        """Write the values of some tensors, each once. Raises: OSError."""
        for name, tensor in tensors.items():
            planned, (file, start) = self._tensors[name], self._places.pop(name)
            assert (tensor.shape, tensor.dtype) == (planned.shape, planned.dtype), name
            file.seek(start)
            _write_all(file, _bytes(tensor))

    def finish(self) -> None:
        """Write the index, if there are several shards, when all tensors were written. Raises: OSError."""
        assert not self._places, f"never written: {sorted(self._places)[:3]}"
        if self._split.is_sharded:
            index = {"metadata": self._split.metadata, "weight_map": self._split.tensor_to_filename}
            (self.path / INDEX).write_text(json.dumps(index, indent=2), encoding="utf-8")


def names_of_files(model_dir: Path) -> list[str]:
    """The weight files of a model: its one file, or those of its index, in order. Raises: OSError."""
    if (model_dir / SINGLE).is_file():
        return [SINGLE]
    return sorted(set(json.loads((model_dir / INDEX).read_text(encoding="utf-8"))["weight_map"].values()))


def write_file(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write one file as safetensors' `save_file` does, which would first copy all tensors. Raises: OSError."""
    header, starts = file_header(tensors)
    with path.open("wb", buffering=0) as file:
        _write_all(file, memoryview(header))
        for name in starts:
            _write_all(file, _bytes(tensors[name]))


def _bytes(tensor: Tensor) -> memoryview:
    import torch

    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data


def _write_all(file: FileIO, data: memoryview) -> None:
    """Write all of it: the system takes no more than 2 GiB at once."""
    while data:
        data = data[file.write(data) :]


def file_header(tensors: Mapping[str, Tensor], metadata: dict[str, str] | None = None) -> tuple[bytes, dict[str, int]]:
    """The beginning of a safetensors file, up to the first tensor's bytes, and where each tensor begins, in this order.

    safetensors itself decides on the order and on the types' names: it writes the same tensors without values.
    """
    import torch
    from safetensors.torch import save

    empty = save({name: torch.empty(0, dtype=t.dtype) for name, t in tensors.items()}, metadata)
    entries = json.loads(empty[8 : 8 + int.from_bytes(empty[:8], "little")])
    end, starts = 0, {}
    for name, entry in entries.items():
        if name != "__metadata__":
            tensor, starts[name] = tensors[name], end
            end += tensor.numel() * tensor.dtype.itemsize
            entry |= {"shape": list(tensor.shape), "data_offsets": [starts[name], end]}
    text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text, {name: 8 + len(text) + start for name, start in starts.items()}
