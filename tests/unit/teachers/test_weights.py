"""Teachers' tensors that stay in memory, and how often files are read."""

from __future__ import annotations

from pathlib import Path
from threading import Event
from weakref import WeakSet

import pytest
import torch
from safetensors.torch import save_file

from opd.records.types import Teacher
from teachers.weight_keys import base_key, weight_key
from teachers.weights import WeightCache, read_tensors, weights_nbytes

SIZES = {"base": 100, "other": 100, "third": 100, "a": 10, "b": 10, "c": 10}
"""Bytes of the only tensor in each directory."""


class Disk:
    """Reads directories by their size alone and says which."""

    def __init__(self) -> None:
        self.read: list[str] = []

    def __call__(self, directory: Path, dtype: torch.dtype) -> dict[str, torch.Tensor]:
        self.read.append(directory.name)
        return {directory.name: torch.zeros(SIZES[directory.name], dtype=torch.uint8)}


def measured(directory: Path, dtype: torch.dtype) -> int:
    """Bytes of a directory, without reading it."""
    return SIZES[directory.name]


def full(name: str, digest: str = "") -> Teacher:
    return Teacher(name=name, model_dir=Path(name), digest=digest)


def lora(name: str, base: str = "base", digest: str = "", base_digest: str = "") -> Teacher:
    return Teacher(name=name, model_dir=Path(base), adapter_dir=Path(name), digest=digest, base_digest=base_digest)


@pytest.fixture
def disk() -> Disk:
    return Disk()


def cache(disk: Disk, budget: int = 1000) -> WeightCache:
    return WeightCache(torch.uint8, budget, disk, measured)


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


# Reading ahead


def settled(held: WeightCache) -> None:
    """Wait until the thread that reads ahead has nothing left to do."""
    held._thread.submit(lambda: None).result(timeout=10)


def test_what_is_read_ahead_counts(disk: Disk) -> None:
    held = cache(disk, budget=200)
    held.get(full("base"))
    held.get(full("other"))
    held.prefetch(lora("a", "third", base_digest="third"))
    settled(held)
    assert (disk.read, held.nbytes) == (["base", "other"], 200), (
        "other and 110 more do not fit, so nothing goes for them"
    )
    held.prefetch(full("third"))
    settled(held)
    assert (disk.read, held.nbytes) == (["base", "other", "third"], 100), "base made room"
    held.get(full("third"))
    assert (held.nbytes, held.loads) == (200, 3)
    held.get(full("other"))
    assert disk.read == ["base", "other", "third"], "was in use, so it stayed"


def test_a_budget_of_one_teacher_holds_one(disk: Disk) -> None:
    held = cache(disk, budget=1)
    teachers = [full("base"), full("other"), full("third")]
    for teacher, upcoming in zip(teachers, teachers[1:] + teachers[:1], strict=True):
        held.get(teacher)
        held.prefetch(upcoming)
        settled(held)
        assert (held.nbytes, disk.read[-1]) == (100, teacher.name)
    assert held.loads == 3


def test_the_teacher_before_is_gone_when_the_next_one_is_read() -> None:
    held: WeightCache

    def read(directory: Path, dtype: torch.dtype) -> dict[str, torch.Tensor]:
        assert held.nbytes == 0
        return {directory.name: torch.zeros(100, dtype=dtype)}

    held = WeightCache(torch.uint8, 150, read, lambda directory, dtype: 100)
    for name in ("base", "other", "base"):
        held.get(full(name))


@pytest.mark.parametrize(("dtype", "item"), [(torch.float32, 4), (torch.bfloat16, 2)])
def test_size_without_reading_is_that_of_what_is_read(dtype: torch.dtype, item: int, tmp_path: Path) -> None:
    for i, shape in enumerate([(3, 5), (7,), ()]):
        save_file({f"t{i}": torch.zeros(shape, dtype=torch.float16)}, tmp_path / f"part-{i}.safetensors")
    assert weights_nbytes(tmp_path, dtype) == (15 + 7 + 1) * item
    assert sum(t.to(dtype).nbytes for t in read_tensors(tmp_path).values()) == weights_nbytes(tmp_path, dtype)


def test_keys() -> None:
    assert weight_key(lora("a")) != weight_key(lora("b")) != weight_key(full("base"))
    assert base_key(lora("a")) == base_key(lora("b")) == base_key(full("base")) == weight_key(full("base"))
    assert base_key(lora("a", digest="A", base_digest="B")) == weight_key(full("x", digest="B"))


@pytest.mark.parametrize(("budget", "again"), [(200, []), (199, ["base"])], ids=["both fit", "one byte too little"])
def test_teachers_stay_as_long_as_they_fit_the_budget(budget: int, again: list[str], disk: Disk) -> None:
    held = cache(disk, budget)
    for name in ("base", "other", "base"):
        held.get(full(name))
    assert disk.read == ["base", "other", *again]


def test_what_was_used_again_outlives_what_was_not(disk: Disk) -> None:
    held = cache(disk, budget=35)
    for name in ("a", "b", "c", "a", "base"):  # base alone is above the budget: all others go
        held.get(full(name))
    assert (disk.read, held.nbytes) == (["a", "b", "c", "base"], 100)
    disk.read.clear()
    held = cache(disk, budget=120)
    for name in ("a", "b", "a", "base"):
        held.get(full(name))
    assert held.nbytes == 120
    held.get(full("c"))
    held.get(full("a"))
    assert disk.read == ["a", "b", "base", "c"], "b went for c and not a, which came first but was used again"


@pytest.mark.parametrize("budget", [0, 99])
def test_the_teacher_in_use_stays_above_any_budget(budget: int, disk: Disk) -> None:
    held = cache(disk, budget)
    for _ in range(3):
        held.get(full("base"))
    assert (disk.read, held.nbytes) == (["base"], 100)
    held.prefetch(full("other"))
    held.get(full("base"))
    held.get(full("other"))
    assert (disk.read, held.nbytes) == (["base", "other"], 100)


def test_tensors_that_share_memory_count_once() -> None:
    tied = torch.zeros(10, dtype=torch.uint8)
    held = WeightCache(torch.uint8, 100, lambda directory, dtype: {"a": tied, "b": tied.view(2, 5)}, measured)
    held.get(full("base"))
    assert held.nbytes == 10


# Reading ahead


def test_reading_ahead_returns_at_once_and_reads_once() -> None:
    may_read, read = Event(), []

    def slow(directory: Path, dtype: torch.dtype) -> dict[str, torch.Tensor]:
        assert may_read.wait(30)
        read.append(directory.name)
        return {"weight": torch.full((3,), len(read), dtype=dtype)}

    held = WeightCache(torch.uint8, 1000, slow, measured)
    for _ in range(3):
        held.prefetch(full("base"))
    assert read == []
    may_read.set()
    assert held.get(full("base"))[0]["weight"].tolist() == [1, 1, 1]
    held.prefetch(full("base"))
    held.get(full("base"))
    assert (read, held.loads) == (["base"], 1)


def test_what_reading_ahead_ran_into_is_raised_where_it_is_wanted(disk: Disk) -> None:
    broken = {"base"}

    def read(directory: Path, dtype: torch.dtype) -> dict[str, torch.Tensor]:
        if directory.name in broken:
            raise OSError(f"{directory.name} cannot be read")
        return disk(directory, dtype)

    held = WeightCache(torch.uint8, 1000, read, measured)
    held.prefetch(full("base"))
    held.get(full("other"))  # has nothing to do with it
    for _ in range(2):  # nor does it pass for loaded the second time
        with pytest.raises(OSError, match="base cannot be read"):
            held.get(full("base"))
    broken.clear()
    assert list(held.get(full("base"))[0]) == ["base"]
    assert held.nbytes == 200


def test_what_was_read_ahead_makes_room_if_another_question_comes_between(disk: Disk) -> None:
    alive = WeakSet[torch.Tensor]()

    def read(directory: Path, dtype: torch.dtype) -> dict[str, torch.Tensor]:
        state = disk(directory, dtype)
        alive.update(state.values())
        return state

    held = WeightCache(torch.uint8, 150, read, measured)
    held.get(full("a"))
    held.prefetch(full("other"))
    settled(held)
    held.get(full("third"))  # such as for its head
    assert sum(tensor.nbytes for tensor in alive) == 100
    held.get(full("other"))
    assert (disk.read, held.nbytes) == (["a", "other", "third", "other"], 100)
