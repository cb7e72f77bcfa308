"""Packing: sequences side by side in rows of fixed width, told apart by their position ids.

Used by the trainer and by the teachers, so both see the same token at the same place. transformers builds the block
mask from position ids alone (sdpa, no attention mask, no cache): a position that does not follow its left neighbour
starts a new sequence. Padding would cost 1.9x on mixed lengths.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

ROW_MULTIPLE = 64


@dataclass(frozen=True, slots=True)
class Slot:
    """The place of one sequence."""

    index: int
    """Index of the sequence in the caller's list."""
    row: int
    """Packed row, counted over all micro-batches of the plan."""
    start: int
    """First column."""


@dataclass(frozen=True, slots=True)
class Packing:
    """A plan that puts every sequence into exactly one slot."""

    width: int
    """Columns of every row."""
    num_rows: int
    slots: tuple[Slot, ...]


def pack(lengths: Sequence[int], *, width: int = 0) -> Packing:
    """First-fit decreasing into rows of `width` (default: the longest sequence, rounded up to 64, at least 128)."""
    width = width or max(128, -(-max(lengths, default=1) // ROW_MULTIPLE) * ROW_MULTIPLE)
    assert all(0 < n <= width for n in lengths)
    used: list[int] = []
    slots = []
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        row = next((r for r, n in enumerate(used) if n + lengths[index] <= width), len(used))
        if row == len(used):
            used.append(0)
        slots.append(Slot(index, row, used[row]))
        used[row] += lengths[index]
    return Packing(width, len(used), tuple(slots))
