"""Shares of the scoring: workers are balanced, batches stay whole, and weights go to few workers."""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path

import pytest

from opd.records.types import Rollout, Teacher
from teachers.scorers import SCORE_TOKENS
from teachers.scorers.rows import split_batches
from teachers.shares import TeacherRows, assign_batches, assign_rows


def row(number: int, domain: str, tokens: int) -> Rollout:
    return Rollout.from_tokens(f"{domain}/{number}", (1,) * (tokens // 4), (2,) * (tokens - tokens // 4))


def lora(name: str) -> Teacher:
    return Teacher(name=name, model_dir=Path("base"), adapter_dir=Path(name))


def full(name: str) -> Teacher:
    return Teacher(name=name, model_dir=Path(name))


def groups_of(teachers: list[Teacher], rows: int, tokens: int) -> list[TeacherRows]:
    return [(t, 1.0, tuple(row(i, t.name, tokens) for i in range(rows))) for t in teachers]


def cut(group: TeacherRows) -> list[list[Rollout]]:
    return list(split_batches(group[2], SCORE_TOKENS))


def count_rows(share: list[TeacherRows]) -> int:
    return sum(len(rows) for _, _, rows in share)


@pytest.mark.parametrize(("make", "loads"), [(lora, 1), (full, 17)])
def test_ten_experts_on_eight_workers_are_seven_times_as_fast_and_more(make: object, loads: int) -> None:
    """By count of rows; 51 responses of 2,348 tokens for each expert. Ten full ones are loaded seven times more than on one worker."""
    groups = groups_of([make(f"e{i}") for i in range(10)], 51, 2348)  # type: ignore[operator]
    shares = assign_rows(groups, 8, cut)
    assert sum(map(count_rows, shares)) == 510
    assert 510 / max(map(count_rows, shares)) >= 7
    bases = [{teacher.model_dir for teacher, _, _ in share} for share in shares]
    assert sum(len(some) for some in bases) <= max(loads, 8)


def test_one_expert_gains_from_every_worker() -> None:
    shares = assign_rows(groups_of([full("e")], 64, 2348), 8, cut)
    assert [count_rows(share) for share in shares] == [8] * 8


def test_all_workers_are_at_the_same_expert_of_a_base() -> None:
    """The trainer's first micro-batches need the first expert's rows."""
    shares = assign_rows(groups_of([lora(f"e{i}") for i in range(4)], 8, 4000), 4, cut)
    assert [[(t.name, len(rows)) for t, _, rows in share] for share in shares] == [[(f"e{i}", 2) for i in range(4)]] * 4


def test_each_worker_cuts_its_rows_into_the_same_batches_again() -> None:
    rng = random.Random(0)
    for _ in range(50):
        groups = [
            (make(f"e{i}"), 1.0, tuple(row(n, f"e{i}", rng.choice((4, 9, 300, 1700, 5000))) for n in range(rng.randrange(1, 30))))
            for i, make in enumerate(rng.choices((lora, full), k=rng.randrange(1, 7)))
        ]  # fmt: skip
        wanted = Counter(tuple(r.sample_id for r in batch) for group in groups for batch in cut(group))
        shares = assign_rows(groups, rng.randrange(1, 9), cut)
        assert Counter(tuple(r.sample_id for r in batch) for s in shares for g in s for batch in cut(g)) == wanted


def test_workers_are_balanced_up_to_two_batches_and_few_bases_are_divided() -> None:
    rng = random.Random(1)
    for _ in range(200):
        workers = rng.randrange(1, 9)
        bases = [f"b{i}" for i in range(rng.randrange(1, 12)) for _ in range(rng.randrange(1, 20))]
        tokens = [rng.randrange(1, 4097) for _ in bases]
        owners = assign_batches(bases, tokens, workers)
        loads = Counter[int]()
        for owner, size in zip(owners, tokens, strict=True):
            loads[owner] += size
        assert set(loads) <= set(range(workers))
        assert max(loads.values()) <= sum(tokens) / workers + 2 * 4096 + 1
        assert len(set(zip(bases, owners, strict=True))) <= len(set(bases)) + workers - 1


def test_a_step_without_rows() -> None:
    assert assign_rows([], 3, cut) == [[], [], []]
