"""Who is scored together follows from the prompts: the order in which they are answered changes nothing."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from opd.records.types import Prompt, Rollout
from opd.rollouts.groups import Groups
from opd.rollouts.responses import sample_ids
from tests.rows import make_rollout


def prompts(**domains: int) -> list[Prompt]:
    """So many of each domain, side by side in turns."""
    most = max(domains.values())
    return [
        Prompt(id=f"{d}/{i}", domain=d, token_ids=(1, i)) for i in range(most) for d, num in domains.items() if i < num
    ]


def segment(sample_id: str, number: int = 0) -> Rollout:
    return make_rollout(
        sample_id=f"{sample_id}/{number}" if number else sample_id, step=1, domain="a", prompt_ids=(1,), response_ids=(2,)
    )  # fmt: skip


def told(asked: Sequence[Prompt], size: int, order: Sequence[int]) -> list[tuple[int, list[str]]]:
    """The groups as they became whole, with the ids of their rollouts; a prompt of an even place has two."""
    found: list[tuple[int, list[str]]] = []
    ids = sample_ids(asked, 1)
    groups = Groups(asked, ids, size, lambda number, rows: found.append((number, [r.sample_id for r in rows])))
    for place in order:
        groups.written(ids[place], [segment(ids[place]), segment(ids[place], 1)][: 2 - place % 2])
    return found


def test_groups_are_consecutive_prompts_of_one_domain() -> None:
    asked = prompts(b=3, a=5)
    ids = sample_ids(asked, 1)
    groups = Groups(asked, ids, 2, lambda *_: None)
    found = {number: [i[7:] for i in ids if groups.of[i] == number] for number in sorted(set(groups.of.values()))}
    assert found == {0: ["a/0", "a/1"], 1: ["a/2", "a/3"], 2: ["a/4"], 3: ["b/0", "b/1"], 4: ["b/2"]}


@pytest.mark.parametrize(("size", "sizes"), [(1, [4, 4, 4]), (4, [4, 4, 4]), (5, [8, 4]), (99, [12])])
def test_the_responses_to_one_prompt_are_not_parted(size: int, sizes: list[int]) -> None:
    asked = [p for p in prompts(a=3) for _ in range(4)]
    groups = Groups(asked, sample_ids(asked, 1), size, lambda *_: None)
    numbers = list(groups.of.values())
    assert [numbers.count(number) for number in sorted(set(numbers))] == sizes


def test_any_order_gives_the_same_groups_with_their_rows_in_order() -> None:
    asked = prompts(a=7, b=4)
    wanted = dict(told(asked, 3, range(len(asked))))
    for seed in range(20):
        order = random.Random(seed).sample(range(len(asked)), k=len(asked))
        assert dict(told(asked, 3, order)) == wanted


def test_a_group_leaves_as_soon_as_its_last_response_is_whole() -> None:
    asked = prompts(a=4)
    assert [number for number, _ in told(asked, 2, [3, 0, 2])] == [1]
    assert [number for number, _ in told(asked, 2, [3, 0, 2, 1])] == [1, 0]


def test_prompts_of_which_nothing_came_hold_nobody_up() -> None:
    asked = prompts(a=2)
    ids, found = sample_ids(asked, 1), list[int]()
    groups = Groups(asked, ids, 2, lambda number, rows: found.append(len(rows)))
    groups.written(ids[0], ())
    groups.written(ids[1], [segment(ids[1])])
    assert found == [1]
