"""The repairs of vLLM's drafting, one by one; tests/integration/test_drafting.py shows them in an engine."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from opd.rollouts.drafting import draw_guesses, repeat_by_counts


def test_each_request_has_its_value_for_each_of_its_tokens() -> None:
    ends = torch.tensor([2, 2, 3], dtype=torch.int32)
    assert repeat_by_counts(torch.tensor([0.5, 9.0, 0.25]), ends, 3).tolist() == [0.5, 0.5, 0.25]
    assert repeat_by_counts(torch.tensor([0.0, 0.7]), torch.tensor([1, 3]), 3, 0, 1).tolist() == pytest.approx(
        [1.0, 0.7, 0.7]
    )


def sampling(temperatures: list[float], seeds: list[int]) -> Any:
    return SimpleNamespace(
        all_greedy=not any(temperatures),
        temperature=torch.tensor(temperatures),
        generators={i: torch.Generator().manual_seed(seed) for i, seed in enumerate(seeds)},
    )


def test_a_guess_depends_on_its_requests_seed_alone() -> None:
    logits = torch.randn(3, 11, generator=torch.Generator().manual_seed(0))
    together, probs = draw_guesses(logits, sampling([1.0, 0.5, 1.0], [3, 4, 5]))
    torch.manual_seed(99)  # vLLM's own stream
    alone, _ = draw_guesses(logits[1:2], sampling([0.5], [4]))
    assert together[1] == alone[0]
    torch.testing.assert_close(probs[1], (logits[1] / 0.5).softmax(-1))


def test_guesses_are_drawn_from_the_probabilities_that_are_returned() -> None:
    logits = torch.tensor([[0.0, 1.0, 2.0]])
    drawn = [int(draw_guesses(logits, sampling([1.0], [seed]))[0]) for seed in range(4000)]
    shares = torch.bincount(torch.tensor(drawn), minlength=3) / 4000
    torch.testing.assert_close(shares, logits[0].softmax(-1), atol=0.03, rtol=0)


def test_greedy_requests_guess_their_first_choice() -> None:
    logits = torch.tensor([[0.0, 5.0, 1.0], [3.0, 0.0, 0.0]])
    mixed, _ = draw_guesses(logits, sampling([0.0, 1.0], []))
    assert mixed[0] == 1
    every, _ = draw_guesses(logits, sampling([0.0, 0.0], []))
    assert every.tolist() == [1, 0]
