"""A budget of tokens: who is over it, and what that earns."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from opd.config.reward import BudgetConfig
from opd.records.types import RolloutBatch
from opd.reward.budget import find_over_budget
from tests.unit.opd.reward.test_stream import rollout, stream


def over(**budget: Any) -> set[str]:
    lengths = {"x": 2, "y": 4, "z": 12}  # 6 on average
    segments = [(rollout(name, response_ids=(1,) * num), "a") for name, num in lengths.items()]
    other = [(rollout("w", "b", response_ids=(1,) * 40), "b")]
    return set(find_over_budget([*segments, *other], BudgetConfig(**budget)))


def test_the_limit_is_a_number_or_a_share_of_the_domains_mean() -> None:
    assert over(tokens=4) == {"z", "w"} and over(tokens=3) == {"y", "z", "w"} and over(tokens=40) == set()
    assert over(share=0.5) == {"y", "z", "w"} and over(share=1.0) == {"z"} and over(share=2.0) == set()
    assert over(share=0.5, tokens=4) == {"z", "w"}, "the larger of the two"


def test_an_episode_has_the_tokens_of_all_its_segments() -> None:
    segments = [(rollout("e", response_ids=(1, 1)), "a"), (rollout("e.1", "b", episode="e", response_ids=(1, 1)), "a")]
    assert find_over_budget(segments, BudgetConfig(tokens=3)) == {"e"}
    assert find_over_budget(segments, BudgetConfig(tokens=4)) == frozenset()


def test_what_is_longer_earns_the_budgets_reward_however_good_it_is() -> None:
    batch = RolloutBatch(
        rollouts=(
            rollout("right", "b", response_ids=(1,), reward=1.0),
            rollout("wrong", "b", response_ids=(1,), reward=0.0),
            rollout("long", "b", response_ids=(1, 2, 3), reward=1.0),
            rollout("broken", "b", response_ids=(1, 2, 3), reward=1.0, stop_reason="raised"),
        ),
        quarantined=(),
    )

    def rewards(**config: Any) -> list[float | None]:
        return [r.reward for r in stream(domains=("b",), **config).judged(batch, []).rollouts]

    assert rewards() == [1.0, 0.0, 1.0, None]
    assert rewards(budget={"tokens": 2}) == [1.0, 0.0, -1.0, None]
    assert rewards(budget={"tokens": 2, "reward": 0.25}) == [1.0, 0.0, 0.25, None]


def test_a_budget_without_a_limit_is_refused() -> None:
    with pytest.raises(ValidationError, match="`tokens`, `share` or both"):
        BudgetConfig()
