"""Every turn is sampled with a seed of its own, and a turn that is asked for again with the one that it had."""

from __future__ import annotations

from opd.rollouts.endpoint.draws import Draws


def test_like_turns_have_different_draws_and_a_lost_one_comes_again() -> None:
    draws = Draws()
    assert [draws.take(0, "a"), draws.take(0, "b"), draws.take(1, "a")] == [1, 2, 1]
    draws.lose(0, "a", 1)
    assert draws.take(0, "c") == 3, "nobody else gets the draw of a request that may come again"
    assert [draws.take(0, "a"), draws.take(0, "a")] == [1, 4]


def test_two_equal_requests_that_were_both_lost() -> None:
    draws = Draws()
    for draw in [draws.take(0, "a"), draws.take(0, "a")]:
        draws.lose(0, "a", draw)
    assert [draws.take(0, "a") for _ in range(3)] == [1, 2, 3]
