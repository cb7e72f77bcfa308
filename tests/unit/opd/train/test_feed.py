"""Rounds get their parts in the order of the plan, early, and within the budget of bytes."""

from __future__ import annotations

import time
from typing import Any

import pytest

from opd.stream.targets import StreamPart
from opd.train.feed import Feed
from tests.rows import make_stream_part

PLAN = [[["a"], ["c"], ["e"]], [["b"], ["d"], ["f"]]]
"""Two ranks, three rounds."""


class Targets:
    """Parts in a given order, each of 10 bytes: a letter is a row, and the handle is the letters. What was taken is there."""

    def __init__(self, *parts: str) -> None:
        self._parts = [make_stream_part(letters, letters) for letters in parts]
        self._here: set[str] = set()
        self.arrived = False
        self.slow_s = 0.0

    def take_part(self) -> StreamPart | None:
        time.sleep(self.slow_s)
        if not self._parts:
            self.arrived = True
            return None
        part = self._parts.pop(0)
        self._here |= set(part.samples)
        return part

    def has_samples(self, ids: list[str]) -> bool:
        return set(ids) <= self._here


def feed(*parts: str, queue: int = 1000) -> Feed:
    made: Any = Targets(*parts)
    return Feed(made, PLAN, queue_bytes=queue)


def none_at_work() -> bool:
    return False


@pytest.mark.parametrize(
    ("order", "first_rank", "second_rank"),
    [
        (("ab", "cd", "ef"), [["ab"], ["cd"], ["ef"]], [["ab"], ["cd"], ["ef"]]),
        (("a", "cd", "b", "e", "f"), [["a", "cd"], [], ["e"]], [["cd", "b"], [], ["f"]]),
        (("f", "e", "d", "c", "b", "a"), [["e", "c", "a"], [], []], [["f", "d", "b"], [], []]),
        (("abcdef", ""), [["abcdef"], [], []], [["abcdef"], [], []]),
    ],
)
def test_a_round_gets_what_came_since_the_last_and_a_rank_the_parts_with_its_rows(
    order: tuple[str, ...], first_rank: list[list[str]], second_rank: list[list[str]]
) -> None:
    made = feed(*order)
    rounds = [made.send_rows(index, none_at_work) for index in range(3)]
    assert [own for own, _ in rounds] == first_rank
    assert [own for _, own in rounds] == second_rank
    assert made.early == 2


def test_only_waiting_with_no_round_at_work_is_counted() -> None:
    made: Any = Targets("ab", "cd", "ef")
    made.slow_s = 0.05
    fed = Feed(made, PLAN, queue_bytes=1000)
    fed.send_rows(0, none_at_work)
    first = fed.waited_s
    assert first >= 0.05
    fed.send_rows(1, none_at_work)
    assert fed.waited_s == first, "round 0 is at work"
    fed.mark_trained(0)
    fed.mark_trained(1)
    fed.send_rows(2, none_at_work)
    assert fed.waited_s >= first + 0.1, "the last part, and the end"


def test_a_full_queue_waits_for_the_oldest_round() -> None:
    made = feed("ab", "cd", "ef", queue=10)
    ended: list[int] = []

    def finish_oldest() -> bool:
        ended.append(len(ended))
        made.mark_trained(ended[-1])
        return True

    assert made.send_rows(0, none_at_work) == [["ab"], ["ab"]]
    assert made.send_rows(1, finish_oldest) == [["cd"], ["cd"]] and ended == [0]
    assert made.send_rows(2, finish_oldest) == [["ef"], ["ef"]] and ended[:2] == [0, 1]
    assert made.peak_bytes == 10


def test_a_queue_with_room_waits_for_nobody() -> None:
    made = feed("ab", "cd", "ef", queue=21)

    def finish_oldest() -> bool:
        raise AssertionError("nobody has to be waited for")

    assert [made.send_rows(index, finish_oldest) for index in range(2)] == [[["ab"], ["ab"]], [["cd"], ["cd"]]]
    assert made.peak_bytes == 20


def test_what_the_next_round_needs_is_let_in_though_the_queue_is_full() -> None:
    made = feed("ef", "cd", "ab", queue=10)
    assert made.send_rows(0, none_at_work) == [["ef", "cd", "ab"], ["ef", "cd", "ab"]]
    assert made.peak_bytes == 30


def test_a_part_counts_until_its_last_row_is_trained() -> None:
    made = feed("ae", "b", "c", "d", "f", queue=1000)
    made.send_rows(0, none_at_work)
    assert made._count_untrained_bytes() == 20
    made.mark_trained(0)
    assert made._count_untrained_bytes() == 10, "e is trained in round 2"
    made.send_rows(1, none_at_work)
    made.send_rows(2, none_at_work)
    made.mark_trained(1)
    assert made._count_untrained_bytes() == 20
    made.mark_trained(2)
    assert made._count_untrained_bytes() == 0
