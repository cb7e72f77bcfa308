"""Every row is trained once, and no rank waits long for another."""

from __future__ import annotations

import random

import pytest

from opd.records.types import Rollout
from opd.train.plan import RowSize, measure_row_sizes, plan_micro_batches
from tests.rows import make_rollout


def rows(num: int, seed: int = 0, longest: int = 300) -> list[RowSize]:
    rng = random.Random(seed)
    return [RowSize(f"s{i:03d}", f"d{rng.randrange(5)}", rng.randint(2, longest)) for i in range(num)]


@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
@pytest.mark.parametrize("num", [1, 2, 7, 60, 200])
@pytest.mark.parametrize("tokens", [64, 1000, 100_000])
def test_all_rows_once_in_step_and_balanced(num: int, ranks: int, tokens: int) -> None:
    given = rows(num)
    plan = plan_micro_batches(given, ranks, tokens)
    assert len(plan) == ranks
    assert len({len(parts) for parts in plan}) == 1
    assert sorted(i for parts in plan for ids in parts for i in ids) == sorted(r.sample_id for r in given)
    length = {r.sample_id: r.length for r in given}
    loads = [sum(length[i] for ids in parts for i in ids) for parts in plan]
    assert max(loads) - min(loads) <= max(length.values())


def test_a_ranks_rows_are_ordered_by_domain() -> None:
    given = rows(200)
    domain = {r.sample_id: r.domain for r in given}
    for parts in plan_micro_batches(given, 3, 1000):
        order = [domain[i] for ids in parts for i in ids]
        assert order == sorted(order)


def test_micro_batches_are_about_as_large_as_asked() -> None:
    given = rows(200)
    length = {r.sample_id: r.length for r in given}
    for parts in plan_micro_batches(given, 2, 2000):
        assert len(parts) > 3
        for ids in parts:
            assert sum(length[i] for i in ids) <= 2000 + max(length.values())


def test_without_rows_every_rank_still_runs_once() -> None:
    assert plan_micro_batches([], 3, 100) == [[[]], [[]], [[]]]


def test_more_ranks_than_rows_leave_empty_micro_batches() -> None:
    plan = plan_micro_batches([RowSize("a", "d", 250)], 2, 100)
    assert [len(parts) for parts in plan] == [3, 3]
    assert sorted(i for parts in plan for ids in parts for i in ids) == ["a"]


def test_a_plan_does_not_depend_on_the_order_of_the_rows() -> None:
    given = rows(60)
    assert plan_micro_batches(given, 3, 500) == plan_micro_batches(given[::-1], 3, 500)


@pytest.mark.parametrize("ranks", [1, 3])
def test_padding_counts_where_rows_are_padded(ranks: int) -> None:
    given = [*rows(60, longest=20), RowSize("long", "d2", 300)]
    length = {r.sample_id: r.length for r in given}

    def largest(padded: bool) -> int:
        plan = plan_micro_batches(given, ranks, 400, padded=padded)
        assert sorted(i for parts in plan for ids in parts for i in ids) == sorted(length)
        assert len({len(parts) for parts in plan}) == 1
        return max(len(ids) * max(length[i] for i in ids) for parts in plan for ids in parts if ids)

    assert largest(padded=False) > 400
    assert largest(padded=True) <= 400
    (alone,) = plan_micro_batches([RowSize("one", "d", 900)], 1, 64, padded=True)
    assert [ids for ids in alone if ids] == [["one"]], "larger than a micro-batch"


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("ranks", [1, 3, 8])
def test_a_short_first_round_is_cut_off_the_first_of_many(ranks: int, padded: bool) -> None:
    given = rows(200)
    length = {r.sample_id: r.length for r in given}
    for tokens in (100, 1000, 3000, 100_000):
        whole = plan_micro_batches(given, ranks, tokens, padded=padded)
        short = plan_micro_batches(given, ranks, tokens, padded=padded, short_first=True)
        if len(whole[0]) < 4:
            assert short == whole, "a round more is much for a step of few"
            continue
        assert len({len(parts) for parts in short}) == 1
        for before, parts in zip(whole, short, strict=True):
            ids = [i for part in before for i in part]
            assert [i for part in parts for i in part] == ids, "trained in the same order"
            first = sum(length[i] for i in parts[0])
            assert len(parts[0]) <= 1 or first <= sum(length[i] for i in ids) / 32
            if len(parts) > len(before):
                assert parts[0] + parts[1] == before[0] and parts[2:] == before[1:]
        assert any(len(parts[0]) for parts in short)
    assert (
        len(plan_micro_batches(given, 1, 3000, short_first=True)[0]) == len(plan_micro_batches(given, 1, 3000)[0]) + 1
    )


def test_a_first_round_of_one_row_is_short_already() -> None:
    given = [RowSize(f"s{i}", "d", 100) for i in range(20)]
    assert plan_micro_batches(given, 2, 100, short_first=True) == plan_micro_batches(given, 2, 100)


def responses(prompts: int, n: int) -> list[Rollout]:
    """`n` responses of 5 tokens to each prompt of 20, over three domains."""
    return [
        make_rollout(
            sample_id=f"s{p:02}#{i}", step=1, domain=f"d{p % 3}", prompt_ids=(p,) * 20, response_ids=(100 + i,) * 5
        )
        for p in range(prompts)
        for i in range(n)
    ]


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_responses_to_one_prompt_stay_in_one_micro_batch_and_count_it_once(ranks: int) -> None:
    given = responses(prompts=30, n=4)
    sizes = measure_row_sizes(given, share=True)
    assert [row.length for row in sizes] == [20 + 4 * 5] * 30
    plan = plan_micro_batches(sizes, ranks, 100)
    assert sorted(i for parts in plan for ids in parts for i in ids) == sorted(r.sample_id for r in given)
    for parts in plan:
        for ids in parts:
            assert sorted(ids) == sorted(f"{prompt}#{i}" for prompt in {i[:3] for i in ids} for i in range(4))
            assert len(ids) // 4 * 40 <= 100 + 40
        order = [int(i[1:3]) % 3 for ids in parts for i in ids]
        assert order == sorted(order), "by domain"
    loads = [sum(map(len, parts)) for parts in plan]
    assert max(loads) - min(loads) <= 4


def test_rows_that_share_nothing_are_planned_one_by_one() -> None:
    given = responses(prompts=5, n=1)
    assert {row.sample_id: row for row in measure_row_sizes(given, share=True)} == {
        r.sample_id: r for r in measure_row_sizes(given)
    }
    assert measure_row_sizes(responses(1, 3)) == [RowSize(f"s00#{i}", "d0", 25) for i in range(3)]
