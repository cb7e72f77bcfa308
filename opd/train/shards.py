"""The state of the trainer's ranks on disk: float32 weights and Adam moments as safetensors, divided as ZeRO-3 divides them.

    trainer.json          the number of ranks that wrote, and AdamW's step count
    rank-0.safetensors    param/NAME, exp_avg/NAME, exp_avg_sq/NAME, perhaps average-D/NAME: the first part of every flattened parameter
    rank-1.safetensors    the next part of each, and so on

The parts of all ranks, one after the other, are the flattened parameter without the padding that ZeRO-3 adds. So any number of
ranks can read them. Each reads only what it needs, and no rank ever holds the whole model.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor

from opd.files import blake3_file, raise_storage_errors
from opd.models.files import write_file
from opd.records.types import WrittenFile

PLAN = "trainer.json"
MOMENTS = ("exp_avg", "exp_avg_sq")


def compute_part_sizes(numel: int, world_size: int) -> list[int]:
    """Return how many of a parameter's `numel` numbers each rank has. Each has an equal part, rounded up; the last ones may have
    fewer or none."""
    size = -(-numel // world_size)
    return [max(0, min(size, numel - rank * size)) for rank in range(world_size)]


def write_shard(
    directory: Path, rank: int, world_size: int, tensors: Mapping[str, Tensor], adam_step: int
) -> tuple[WrittenFile, ...]:
    """Write a rank's file and sync it to the disk; rank 0 does the same with `trainer.json`. Raises: StorageError."""
    began = time.monotonic()
    paths = [directory / f"rank-{rank}.safetensors"]
    with raise_storage_errors(paths[0]):
        write_file(paths[0], tensors)
        if rank == 0:
            paths.append(directory / PLAN)
            paths[1].write_text(json.dumps({"world_size": world_size, "adam_step": adam_step}))
        for path in paths:
            with path.open("rb") as file:
                os.fsync(file.fileno())
    # With one thread, because training goes on meanwhile and needs the other cores.
    hashes = [blake3_file(path, threads=1) for path in paths]
    seconds = time.monotonic() - began
    return tuple(
        WrittenFile(name=path.name, blake3=digest, size=path.stat().st_size, seconds=seconds)
        for path, digest in zip(paths, hashes, strict=True)
    )


class Shards:
    """The files of all ranks that wrote a checkpoint, read piece by piece."""

    def __init__(self, directory: Path) -> None:
        plan = json.loads((directory / PLAN).read_text())
        self.adam_step: int = plan["adam_step"]
        self._paths = [directory / f"rank-{rank}.safetensors" for rank in range(plan["world_size"])]

    def __enter__(self) -> Self:
        from safetensors import safe_open

        with ExitStack() as stack:
            self._files = [
                stack.enter_context(safe_open(path, framework="pt", backend="pread")) for path in self._paths
            ]
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def has_kind(self, kind: str) -> bool:
        """Return True if the checkpoint has tensors of this kind."""
        names: list[str] = self._files[0].keys()
        return any(name.startswith(f"{kind}/") for name in names)

    def read_slice(self, name: str, numel: int, start: int, size: int) -> Tensor:
        """Return `size` numbers from index `start` of the flat tensor `name`, which has `numel` numbers; zeros past its end."""
        out = torch.zeros(size)
        offset = 0
        for file, held in zip(self._files, compute_part_sizes(numel, len(self._files)), strict=True):
            low, high = max(start, offset), min(start + size, offset + held)
            if low < high:
                stored: Any = file.get_slice(name)
                assert stored.get_shape() == [held], (name, stored.get_shape(), held)
                out[low - start : high - start] = stored[low - offset : high - offset]
            offset += held
        return out
