"""Which teachers' tensors stay in memory, and how often files are read."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from opd.types import Teacher
from teachers.weights import WeightCache, base_key, weight_key

SIZES = {"base": 100, "other": 100, "a": 10, "b": 10, "c": 10}
"""Bytes of the only tensor in each directory."""


class Disk:
    """Reads directories by their size alone and says which."""

    def __init__(self) -> None:
        self.read: list[str] = []

    def __call__(self, directory: Path, dtype: torch.dtype) -> dict[str, torch.Tensor]:
        self.read.append(directory.name)
        return {directory.name: torch.zeros(SIZES[directory.name], dtype=torch.uint8)}


def full(name: str, digest: str = "") -> Teacher:
    return Teacher(name=name, model_dir=Path(name), digest=digest)


def lora(name: str, base: str = "base", digest: str = "", base_digest: str = "") -> Teacher:
    return Teacher(name=name, model_dir=Path(base), adapter_dir=Path(name), digest=digest, base_digest=base_digest)


@pytest.fixture
def disk() -> Disk:
    return Disk()


def cache(disk: Disk, budget: int = 1000) -> WeightCache:
    return WeightCache(torch.uint8, budget, disk, lambda directory, dtype: SIZES[directory.name])


def test_a_full_model_is_one_entry_and_an_adapter_two(disk: Disk) -> None:
    held = cache(disk)
    assert [list(state) for state in held.get(full("base"))] == [["base"]]
    assert [list(state) for state in held.get(lora("a"))] == [["base"], ["a"]]
    assert (disk.read, held.nbytes) == (["base", "a"], 110)


@pytest.mark.parametrize("ahead", [False, True])
def test_adapters_of_one_base_read_it_once(ahead: bool, disk: Disk) -> None:
    held = cache(disk)
    for _ in range(2):
        for name in "abc":
            if ahead:
                held.prefetch(lora(name))
            held.get(lora(name))
    assert (disk.read, held.loads, held.nbytes) == (["base", "a", "b", "c"], 4, 130)


def test_the_base_is_that_of_equal_weights_wherever_it_lies(disk: Disk) -> None:
    held = cache(disk)
    held.get(lora("a", "base", digest="A", base_digest="same"))
    held.get(lora("b", "other", digest="B", base_digest="same"))
    held.get(full("other", digest="same"))
    assert disk.read == ["base", "a", "b"]


def test_equal_adapters_are_one_entry_and_different_ones_are_not(disk: Disk) -> None:
    held = cache(disk)
    held.get(lora("a", digest="A", base_digest="base"))
    held.get(lora("b", digest="A", base_digest="base"))
    held.get(lora("c", digest="C", base_digest="base"))
    assert disk.read == ["base", "a", "c"]


def test_base_and_adapter_in_use_stay_under_any_budget(disk: Disk) -> None:
    held = cache(disk, budget=1)
    for name in ("a", "b", "a"):
        assert [list(state) for state in held.get(lora(name))] == [["base"], [name]]
        assert held.nbytes == 110
    assert disk.read == ["base", "a", "b", "a"], "the base stayed"


def test_the_least_recently_used_goes_first(disk: Disk) -> None:
    held = cache(disk, budget=215)
    for teacher in (lora("a"), full("other"), lora("b")):
        held.get(teacher)
    assert held.nbytes == 210, "a went; the base was used again"
    held.get(full("other"))
    held.get(lora("b"))
    assert disk.read == ["base", "a", "other", "b"]


def test_keys() -> None:
    assert weight_key(lora("a")) != weight_key(lora("b")) != weight_key(full("base"))
    assert base_key(lora("a")) == base_key(lora("b")) == base_key(full("base")) == weight_key(full("base"))
    assert base_key(lora("a", digest="A", base_digest="B")) == weight_key(full("x", digest="B"))
