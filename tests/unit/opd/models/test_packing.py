"""Every sequence has one slot of its own, and those that begin alike share it."""

from __future__ import annotations

import random

import pytest

from opd.models.packing import (
    WIDEST_TREE,
    build_trees,
    compute_tree_limit,
    count_columns,
    make_packing_units,
    pack_into_rows,
)
from opd.records.types import Rollout
from tests.rows import make_rollout

CASES = [[], [1], [128], [129], [64] * 9, [1] * 500, [127, 2, 1, 128], random.Random(0).choices(range(1, 700), k=300)]


@pytest.mark.parametrize("lengths", CASES, ids=lambda n: f"{len(n)} sequences")
def test_every_sequence_has_one_slot_without_overlap(lengths: list[int]) -> None:
    packing = pack_into_rows(lengths)
    assert sorted(s.index for s in packing.slots) == list(range(len(lengths)))
    taken = [(s.row, column) for s in packing.slots for column in range(s.start, s.start + lengths[s.index])]
    assert len(taken) == len(set(taken)) == sum(lengths)
    assert all(0 <= row < packing.num_rows and 0 <= column < packing.width for row, column in taken)
    assert {row for row, _ in taken} == set(range(packing.num_rows))


def test_rows_are_as_wide_as_the_lengths_need() -> None:
    assert pack_into_rows([64, 64]).width == 128 and pack_into_rows([64, 64, 1]).width == 128
    assert pack_into_rows([3, 6]).width == 16 and pack_into_rows([64, 1]).width == 72, (
        "no more than short sequences fill"
    )
    assert pack_into_rows([640]).width == 640 and pack_into_rows([107] * 9).width == 112, "a multiple of eight"
    assert (pack_into_rows([100, 60, 60]).width, pack_into_rows([100, 60, 60]).num_rows) == (232, 1), (
        "a wider row wastes less"
    )
    assert pack_into_rows([100] * 7 + [20] * 7).num_rows == 7


@pytest.mark.parametrize("length", [1, 8, 16, 64, 72, 200])
def test_no_more_columns_than_are_reckoned_where_rows_fill_up(length: int) -> None:
    for count in (1, 2, 3, 8, 9, 100):
        packing = pack_into_rows([length] * count)
        assert packing.num_rows * packing.width <= count_columns(length * count, length)
    assert count_columns(48, 32) == 48 and count_columns(129, 32) == 256 and count_columns(129, 100) == 136


def test_rows_are_filled() -> None:
    lengths = random.Random(1).choices(range(1, 129), k=400)
    packing = pack_into_rows(lengths)
    assert sum(lengths) / (packing.width * packing.num_rows) > 0.9
    assert pack_into_rows([64] * 10).num_rows == 5


def test_a_plan_depends_on_the_lengths_alone() -> None:
    lengths = random.Random(2).choices(range(1, 129), k=50)
    assert pack_into_rows(lengths) == pack_into_rows(list(lengths))


@pytest.mark.parametrize("lengths", [[0], [5, 0], [300, 0]])
def test_an_empty_sequence_is_a_bug_of_the_caller(lengths: list[int]) -> None:
    with pytest.raises(AssertionError):
        pack_into_rows(lengths)


# Trees


def families(prompts: int, n: int, prompt: int = 40, response: int = 9, seed: int = 0) -> list[list[int]]:
    """`n` sequences behind each prompt, in random order; no two prompts begin alike."""
    rng = random.Random(seed)
    made = []
    for first in range(prompts):
        stem = [first, *rng.choices(range(70), k=prompt - 1)]
        made += [[*stem, 100 + i, *rng.choices(range(70), k=response - 1)] for i in range(n)]
    rng.shuffle(made)
    return made


def test_every_prompt_is_computed_once() -> None:
    given = families(prompts=6, n=4)
    found = build_trees(given)
    assert sorted(i for tree in found for i in tree.members) == list(range(24))
    assert [(len(tree.members), tree.size) for tree in found] == [(4, 40 + 4 * 9)] * 6
    for tree in found:
        assert len({tuple(given[i][:40]) for i in tree.members}) == 1
        assert tree.shared == (0, 40, 40, 40)


def test_a_tree_has_the_distinct_prefixes_of_its_members_and_no_other_token() -> None:
    rng = random.Random(1)
    given = [rng.choices(range(3), k=rng.randint(1, 12)) for _ in range(300)]
    for tree in build_trees(given):
        distinct = {tuple(given[i][:stop]) for i in tree.members for stop in range(1, len(given[i]) + 1)}
        assert tree.size == len(distinct)
    assert build_trees([]) == []
    assert [(t.members, t.shared, t.size) for t in build_trees([[1, 2], [1, 2], [1]])] == [((2, 0, 1), (0, 1, 2), 2)]


def test_who_shares_little_is_a_tree_of_its_own() -> None:
    """Four times the shared tokens is the most that a member adds: for less the wider row would cost more."""
    assert len(build_trees([[7] * 10 + [1] * 40, [7] * 10 + [2] * 40])) == 1
    assert len(build_trees([[7] * 10 + [1] * 41, [7] * 10 + [2] * 41])) == 2
    assert [t.size for t in build_trees([[7, 1, 2, 3, 4, 5], [7, 2, 3, 4, 5, 6]])] == [6, 6], (
        "a first token that all have"
    )


def test_a_tree_is_at_most_as_wide_as_its_limit() -> None:
    assert [t.size for t in build_trees(families(prompts=1, n=40, prompt=100, response=50))] == [100 + 8 * 50] * 5
    (longest, *_) = long = families(prompts=1, n=8, prompt=500, response=200)
    assert [t.size for t in build_trees(long)] == [500 + 4 * 200] * 2
    assert compute_tree_limit(len(longest)) == 1400 and compute_tree_limit(3) == WIDEST_TREE


def test_a_tree_is_the_same_beside_others_as_alone() -> None:
    """The plan sees all rows of a domain, a micro-batch those of its own trees: both must count the same tokens."""
    given = [*families(prompts=1, n=40, prompt=100, response=50), [99] * 2000]
    whole = [tree for tree in build_trees(given) if len(tree.members) > 1]
    assert [tree.size for tree in whole] == [100 + 8 * 50] * 5
    for tree in whole:
        (alone,) = build_trees([given[i] for i in tree.members])
        assert alone.size == tree.size


def test_trees_do_not_depend_on_the_order_of_the_sequences() -> None:
    given = families(prompts=6, n=3)
    found = [
        {frozenset(map(tuple, (each[i] for i in t.members))) for t in build_trees(each)}
        for each in (given, given[::-1])
    ]
    assert found[0] == found[1]


def test_a_unit_is_of_one_domain() -> None:
    def one(i: int, domain: str) -> Rollout:
        return make_rollout(
            sample_id=f"{domain}/{i}", step=1, domain=domain, prompt_ids=(1, 2, 3), response_ids=(10 + i, 4)
        )

    given = [one(i, domain) for i in range(2) for domain in "ab"]
    assert [(u.rollouts, u.size) for u in make_packing_units(given, share=False)] == [((r,), 5) for r in given]
    assert [(u.rollouts, u.size) for u in make_packing_units(given, share=True)] == [
        ((given[0], given[2]), 7),
        ((given[1], given[3]), 7),
    ]
