"""Weight files of a model: functions that find them in a directory, and a class that writes them tensor by tensor, so that no process
has to hold more than one tensor.

Its files are the same, byte for byte, as those that huggingface_hub and safetensors write for these tensors: one
`model.safetensors`, or shards of up to 5 GB and an index.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import ExitStack
from io import FileIO
from pathlib import Path
from typing import TYPE_CHECKING, Self

from opd.errors import ModelError, OpdError
from opd.models.lora import ADAPTER_CONFIG, ADAPTER_WEIGHTS

if TYPE_CHECKING:
    from torch import Tensor

SHARD = "5GB"
"""Most bytes of a shard, unless a single tensor is larger."""
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
METADATA = {"format": "pt"}


class ModelFiles:
    """The weight files of a directory while they are being written."""

    def __init__(self, path: Path, tensors: Mapping[str, Tensor], shard: int | None = None) -> None:
        """Plan the files in the directory `path`.

        `tensors`: name -> every tensor that will be written; their values are not read, and their order decides which shard a
        tensor is in. `shard`: most bytes of a shard; None: `SHARD`.
        """
        from huggingface_hub import split_torch_state_dict_into_shards

        self.path = path
        self._tensors = dict(tensors)
        self._split = split_torch_state_dict_into_shards(self._tensors, max_shard_size=shard or SHARD)
        self._unwritten: dict[str, tuple[FileIO, int]] = {}
        """Name of a tensor that is not written yet -> its file, and the place of its first byte there."""

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            for name, members in self._split.filename_to_tensors.items():
                file = stack.enter_context((self.path / name).open("wb", buffering=0))
                header, starts = make_header({member: self._tensors[member] for member in members}, METADATA)
                _write_all(file, memoryview(header))
                self._unwritten |= {member: (file, start) for member, start in starts.items()}
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def write(self, tensors: Mapping[str, Tensor]) -> None:
        """Write the values of some tensors; each is written once, in any order. Raises: OSError."""
        for name, tensor in tensors.items():
            planned, (file, start) = self._tensors[name], self._unwritten.pop(name)
            assert (tensor.shape, tensor.dtype) == (planned.shape, planned.dtype), name
            file.seek(start)
            _write_all(file, _tensor_bytes(tensor))

    def finish(self) -> None:
        """Write the index if there are several shards. All tensors must have been written. Raises: OSError."""
        assert not self._unwritten, f"never written: {sorted(self._unwritten)[:3]}"
        if self._split.is_sharded:
            index = {"metadata": self._split.metadata, "weight_map": self._split.tensor_to_filename}
            (self.path / INDEX).write_text(json.dumps(index, indent=2), encoding="utf-8")


def weight_files(directory: Path) -> list[Path]:
    """Return the safetensors files that hold a model, or an adapter, by the choice of transformers and vLLM.

    That is one file of the usual name, or the files that the index names. Other files may lie beside these: shards of an earlier
    save, or `consolidated.safetensors`, which has the same weights under other names. Without such a file or index, all
    safetensors files count, as for vLLM. `experts.weight_files` checks that loaders agree and that the files exist.
    Raises: OSError; ModelError for a damaged index.
    """
    if (directory / ADAPTER_CONFIG).is_file():
        names = {ADAPTER_WEIGHTS}
    elif (directory / SINGLE).is_file():
        names = {SINGLE}
    elif (directory / INDEX).is_file():
        names = set(read_index(directory / INDEX))
    else:
        names = {file.name for file in directory.glob("*.safetensors") if file.is_file()}
    return [directory / name for name in sorted(names)]


def read_index(index: Path) -> list[str]:
    """Return, for each tensor in an index, the name of its file. Raises: OSError; ModelError if the index is damaged or empty."""
    try:
        data = json.loads(index.read_bytes())
    except ValueError as error:
        raise _make_index_error(str(index), str(error)) from None
    weight_map = data.get("weight_map") if isinstance(data, dict) else data
    if (
        not isinstance(weight_map, dict)
        or not weight_map
        or not all(isinstance(name, str) for name in weight_map.values())
    ):
        raise _make_index_error(f"{index}: weight_map", repr(weight_map)[:80])
    if "metadata" not in data:
        raise ModelError.at(
            f"{index}: metadata",
            found="nothing",
            wanted="a mapping, without which transformers reads no index",
            fix='add `"metadata": {}`',
        )
    return list(weight_map.values())


def _make_index_error(location: str, problem: str) -> OpdError:
    return ModelError.at(
        location,
        found=problem,
        wanted="the name of a file for each tensor",
        fix="copy the file from the original model or save the model again with save_pretrained",
    )


def write_file(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write the file that safetensors' `save_file` would write, without its copy of all tensors. Raises: OSError."""
    header, starts = make_header(tensors)
    with path.open("wb", buffering=0) as file:
        _write_all(file, memoryview(header))
        for name in starts:
            _write_all(file, _tensor_bytes(tensors[name]))


def _tensor_bytes(tensor: Tensor) -> memoryview:
    import torch

    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data


def _write_all(file: FileIO, data: memoryview) -> None:
    """Write all of `data`, in several calls if needed: the system takes at most 2 GiB at once."""
    while data:
        data = data[file.write(data) :]


def make_header(tensors: Mapping[str, Tensor], metadata: dict[str, str] | None = None) -> tuple[bytes, dict[str, int]]:
    """Return the header of a safetensors file, and name -> place of the tensor's first byte in the file, in the file's order.

    We have safetensors write the same tensors without values, because it decides on their order and on the names of types.
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
    # safetensors fills its header up to a multiple of 8 bytes, so that the first tensor is aligned.
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text, {name: 8 + len(text) + start for name, start in starts.items()}
