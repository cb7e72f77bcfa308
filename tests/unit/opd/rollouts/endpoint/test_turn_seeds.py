"""Every turn is sampled with a seed of its own, and a turn that is asked for again with the one that it had."""

from __future__ import annotations

from opd.rollouts.endpoint.turn_seeds import Draws


def test_like_turns_have_different_draws_and_a_lost_one_comes_again() -> None:
    draws = Draws()
    assert [draws.draw_for_turn(0, "a"), draws.draw_for_turn(0, "b"), draws.draw_for_turn(1, "a")] == [1, 2, 1]
    draws.give_up_draw(0, "a", 1)
    assert draws.draw_for_turn(0, "c") == 3, "nobody else gets the draw of a request that may come again"
    assert [draws.draw_for_turn(0, "a"), draws.draw_for_turn(0, "a")] == [1, 4]


def test_two_equal_requests_that_were_both_lost() -> None:
    draws = Draws()
    for draw in [draws.draw_for_turn(0, "a"), draws.draw_for_turn(0, "a")]:
        draws.give_up_draw(0, "a", draw)
    assert [draws.draw_for_turn(0, "a") for _ in range(3)] == [1, 2, 3]
