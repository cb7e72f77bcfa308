"""Every sequence has one slot of its own."""

from __future__ import annotations

import random

import pytest

from opd.packing import pack

CASES = [[], [1], [128], [129], [64] * 9, [1] * 500, [127, 2, 1, 128], random.Random(0).choices(range(1, 700), k=300)]


@pytest.mark.parametrize("lengths", CASES, ids=lambda n: f"{len(n)} sequences")
def test_every_sequence_has_one_slot_without_overlap(lengths: list[int]) -> None:
    packing = pack(lengths)
    assert sorted(s.index for s in packing.slots) == list(range(len(lengths)))
    taken = [(s.row, column) for s in packing.slots for column in range(s.start, s.start + lengths[s.index])]
    assert len(taken) == len(set(taken)) == sum(lengths)
    assert all(0 <= row < packing.num_rows and 0 <= column < packing.width for row, column in taken)
    assert {row for row, _ in taken} == set(range(packing.num_rows))


def test_rows_are_as_wide_as_the_longest_needs() -> None:
    assert pack([3, 5]).width == 128
    assert pack([3, 129]).width == 192
    assert pack([640]).width == 640
    assert pack([10, 20], width=32).width == 32


def test_rows_are_filled() -> None:
    lengths = random.Random(1).choices(range(1, 129), k=400)
    packing = pack(lengths)
    assert sum(lengths) / (packing.width * packing.num_rows) > 0.9
    assert pack([64] * 10).num_rows == 5


def test_a_plan_depends_on_the_lengths_alone() -> None:
    lengths = random.Random(2).choices(range(1, 129), k=50)
    assert pack(lengths) == pack(list(lengths))


@pytest.mark.parametrize("lengths", [[0], [5, 0], [33]])
def test_what_fits_in_no_row_is_a_bug_of_the_caller(lengths: list[int]) -> None:
    with pytest.raises(AssertionError):
        pack(lengths, width=32)
