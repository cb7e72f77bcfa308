"""Answers compared with each other, and what cannot be one."""

from __future__ import annotations

import math
import tracemalloc

import pytest
import torch

from opd.interfaces import ScoredRow
from opd.payloads.hidden_states import HiddenStates
from opd.payloads.top_k import TopTokens
from opd.stream.schema import TargetRow
from tests.rows import make_rollout

P = [math.log(p) for p in (0.5, 0.3, 0.1)]


def test_the_same_likeliest_tokens_are_no_gap_whatever_their_order() -> None:
    ours, theirs = TopTokens([4, 7, 9], [P[0], P[1], P[1]]), TopTokens([4, 9, 7], [P[0], P[1], P[1]])
    assert ours.gap(theirs, 1, torch.float32) == 0


def test_the_gap_of_likeliest_tokens_is_about_tokens_and_not_about_ranks() -> None:
    ours, theirs = TopTokens([7, 4, 9], P), TopTokens([4, 7, 9], P)
    assert ours.gap(theirs, 1, torch.float32) == pytest.approx(2 / 3 * (P[0] - P[1]))


def test_a_token_that_another_engine_does_not_name_is_at_most_as_likely_as_its_last() -> None:
    ours, theirs = TopTokens([1, 2, 3], P), TopTokens([4, 5, 9], P)
    assert ours.gap(theirs, 1, torch.float32) == pytest.approx((P[0] - P[2] + P[1] - P[2]) / 3)
    two = TopTokens([4, 7, 4, 7], [P[0], P[1], P[0], P[1]])
    assert two.gap(TopTokens([4, 7, 7, 4], [P[0], P[1]] * 2), 2, torch.float32) == pytest.approx((P[0] - P[1]) / 2)


@pytest.mark.parametrize("width", [0, -1])
def test_states_without_a_width_fit_no_token(width: int) -> None:
    assert not HiddenStates("head", width, b"").fits(3, 4)
    assert not HiddenStates("head", width, b"").fits(0, 4)
    assert HiddenStates("head", 2, b"").fits(0, 4)


def test_states_of_several_responses_are_copied_once() -> None:
    rows: list[ScoredRow] = [
        TargetRow(
            rollout=make_rollout(sample_id=f"{i}", step=1, domain="d", prompt_ids=(1,), response_ids=(2,) * 64),
            teacher="t",
            answer=HiddenStates("head", 1024, bytes([i]) * (64 * 1024 * 4)),
        )
        for i in range(1, 9)
    ]
    size = sum(row.answer.nbytes for row in rows)
    tracemalloc.start()
    try:
        (run,) = HiddenStates.blocks([[row] for row in rows], torch.float32, None)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert len(run) == 8 * 64
    assert peak < 1.5 * size
