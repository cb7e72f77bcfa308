"""Packing: sequences side by side in rows of fixed width, and sequences that begin alike as a tree.

Used by the trainer and by the teachers, so both see the same token at the same place. transformers builds the block
mask from position ids alone (sdpa, no attention mask, no cache): a position that does not follow its left neighbour
starts a new sequence. Padding would cost 1.9x on mixed lengths.

A tree has every prefix once: the prompt, and behind it the responses. What follows a prefix is not in it, so its states are
the same for all that share it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from opd.records.types import Rollout

SHARED = "shared"
"""Name of the layout of trees in `opd.models.layouts.LAYOUTS`."""
SHORT, ROW = 64, 128
"""Sequences that are all at most so long go into rows of so many columns, or into one row that they fill."""
WIDTH_MULTIPLE = 8
"""Rows of longer sequences have a width that this divides: products of such sizes are quick on every machine."""
GOOD_FILL = 0.95
"""Rows that are filled so far are good enough: the search for a better width takes time too."""
WIDEST_TREE = 512
"""Columns up to which a tree grows in any case. Attention looks at the whole width of a row, so wider rows cost more."""
MAX_NEW_PER_SHARED = 4
"""A sequence joins a tree if it adds at most so many times the tokens that it shares. Else the wider row would cost more."""


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


def pack_into_rows(lengths: Sequence[int]) -> Packing:
    """Pack sequences into rows of one width, first-fit decreasing.

    The width is 128 if all sequences are short, or their sum if that is less; else the width that wastes least.
    """
    longest = max(lengths, default=1)
    if longest <= SHORT:
        return _first_fit(lengths, min(ROW, _round_columns(sum(lengths))))
    narrowest = _round_columns(longest)
    # Sequences of 107 tokens fill 96 % of rows of 112 and 84 % of rows of 128; a few columns more may take a second one in.
    narrow_packing = _first_fit(lengths, narrowest)
    if sum(lengths) >= GOOD_FILL * narrow_packing.num_rows * narrow_packing.width:
        return narrow_packing
    wider_packings = (
        _first_fit(lengths, narrowest + width) for width in range(2 * WIDTH_MULTIPLE, ROW + 1, 2 * WIDTH_MULTIPLE)
    )
    return min([narrow_packing, *wider_packings], key=lambda packing: packing.num_rows * packing.width)


def count_columns(tokens: int, longest: int) -> int:
    """Return the columns of all rows for so many tokens in sequences of at most `longest`, if all rows but the last are full."""
    row = ROW if longest <= SHORT and tokens > ROW else WIDTH_MULTIPLE
    return -(-tokens // row) * row


def _round_columns(columns: int) -> int:
    return -(-columns // WIDTH_MULTIPLE) * WIDTH_MULTIPLE


def _first_fit(lengths: Sequence[int], width: int) -> Packing:
    assert all(0 < n <= width for n in lengths)
    used: list[int] = []
    slots = []
    # Ties by index: equal lengths must give the same rows wherever this is computed.
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        row = next((r for r, n in enumerate(used) if n + lengths[index] <= width), len(used))
        if row == len(used):
            used.append(0)
        slots.append(Slot(index, row, used[row]))
        used[row] += lengths[index]
    return Packing(width, len(used), tuple(slots))


@dataclass(frozen=True, slots=True)
class Tree:
    """Sequences that begin alike, in an order in which each shares most with the one before it."""

    members: tuple[int, ...]
    """Indices of the sequences in the caller's list."""
    shared: tuple[int, ...]
    """First tokens of each member that the member before it has too; 0 for the first."""
    size: int
    """Columns: tokens of all members, those that are shared counted once."""


def build_trees(sequences: Sequence[Sequence[int]]) -> list[Tree]:
    """Put all sequences into trees of `compute_tree_limit` columns at most; one that shares too little is a tree of its own.

    The tree of some sequences depends on these alone, so that a micro-batch lays it out as it was planned.
    """
    trees: list[Tree] = []
    previous: Sequence[int] = ()
    longest = 0
    # Sorted by their tokens, sequences that begin alike follow each other.
    for index in sorted(range(len(sequences)), key=lambda i: (tuple(sequences[i]), i)):
        current = sequences[index]
        shared = _common_prefix(previous, current)
        new, longest = len(current) - shared, max(longest, len(current))
        if trees and new <= MAX_NEW_PER_SHARED * shared and trees[-1].size + new <= compute_tree_limit(longest):
            last = trees[-1]
            trees[-1] = Tree((*last.members, index), (*last.shared, shared), last.size + new)
        else:
            trees.append(Tree((index,), (0,), len(current)))
            longest = len(current)
        previous = current
    return trees


def compute_tree_limit(longest: int) -> int:
    """Return the most columns of a tree, given the tokens of its longest member."""
    return max(WIDEST_TREE, 2 * longest)


def _common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    """Return the number of first tokens that are equal in both."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


@dataclass(frozen=True, slots=True)
class PackingUnit:
    """Rollouts that stay in one forward pass: those of a tree, or a single one."""

    rollouts: tuple[Rollout, ...]
    size: int
    """Tokens to compute."""


def make_packing_units(rollouts: Sequence[Rollout], *, share: bool) -> list[PackingUnit]:
    """Return each rollout alone, or with `share` the trees of each domain."""
    if not share:
        return [PackingUnit((r,), len(r.prompt_ids) + len(r.response_ids)) for r in rollouts]
    by_domain: dict[str, list[Rollout]] = defaultdict(list)
    for rollout in rollouts:
        by_domain[rollout.domain].append(rollout)
    return [
        PackingUnit(tuple(domain_rollouts[i] for i in tree.members), tree.size)
        for domain_rollouts in by_domain.values()
        for tree in build_trees([r.prompt_ids + r.response_ids for r in domain_rollouts])
    ]
