"""Parts of a parameter on disk: written by any number of ranks, read by any other, nothing lost and nothing padded."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from blake3 import blake3

from opd.errors import StorageError
from opd.train.shards import Shards, compute_part_sizes, write_shard

WHOLE = {"a": torch.arange(1.0, 8.0), "b": torch.tensor([9.0]), "c": torch.arange(20.0, 32.0)}


def write(directory: Path, world_size: int) -> Path:
    directory.mkdir()
    for rank in range(world_size):
        parts = {}
        for name, flat in WHOLE.items():
            sizes = compute_part_sizes(flat.numel(), world_size)
            parts[name] = flat.split(sizes)[rank].clone()
        files = write_shard(directory, rank, world_size, parts, adam_step=7)
        for file in files:
            data = (directory / file.name).read_bytes()
            assert (file.blake3, file.size) == (blake3(data).hexdigest(), len(data))
    return directory


@pytest.mark.parametrize("now", [1, 2, 3, 5])
@pytest.mark.parametrize("then", [1, 2, 3, 5])
def test_any_number_of_ranks_reads_what_any_number_wrote(then: int, now: int, tmp_path: Path) -> None:
    with Shards(write(tmp_path / "c", then)) as shards:
        assert shards.adam_step == 7
        for name, flat in WHOLE.items():
            size = -(-flat.numel() // now)  # of every rank, as ZeRO-3 pads
            parts = [shards.read_slice(name, flat.numel(), rank * size, size) for rank in range(now)]
            assert {len(part) for part in parts} == {size}
            whole = torch.cat(parts)
            assert torch.equal(whole[: flat.numel()], flat)
            assert not whole[flat.numel() :].any(), "padding is zero"


def test_a_rank_beyond_the_end_holds_nothing() -> None:
    assert compute_part_sizes(7, 2) == [4, 3]
    assert compute_part_sizes(1, 3) == [1, 0, 0]
    assert compute_part_sizes(5, 4) == [2, 2, 1, 0]


def test_a_part_of_another_size_than_planned_is_not_read(tmp_path: Path) -> None:
    with Shards(write(tmp_path / "c", 2)) as shards, pytest.raises(AssertionError):
        shards.read_slice("a", 9, 0, 5)


def test_the_plan_is_rank_zeros_and_plain_json(tmp_path: Path) -> None:
    tensors = {"x": torch.zeros(1)}
    assert [f.name for f in write_shard(tmp_path, 1, 2, tensors, 3)] == ["rank-1.safetensors"]
    assert [f.name for f in write_shard(tmp_path, 0, 2, tensors, 3)] == ["rank-0.safetensors", "trainer.json"]
    assert json.loads((tmp_path / "trainer.json").read_text()) == {"world_size": 2, "adam_step": 3}


def test_a_full_disk_is_said_by_name(tmp_path: Path) -> None:
    (tmp_path / "trainer.json").symlink_to("/dev/full")  # accepts no byte: what a disk does when it is full
    with pytest.raises(StorageError, match=r"rank-0\.safetensors: could not be written: No space left on device"):
        write_shard(tmp_path, 0, 1, {"x": torch.zeros(1)}, 3)
