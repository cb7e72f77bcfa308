"""The reward's curves are its own, and a merge without rewards has none."""

from __future__ import annotations

from typing import Any

import pytest

from opd.records.step import StepRecord
from opd.report.rewards import reward_plots
from opd.report.summary import compute_curves


def record(step: int, reward: dict[str, Any] | None) -> StepRecord:
    data: dict[str, Any] = {"step": step, "loss": 1.0, "domains": {"a": {"loss": 1.0, "tokens": 4, "samples": 2}}}
    return StepRecord.from_json(data | ({} if reward is None else {"reward": reward}))


def rewarded(step: int, mean: float, episodes: int, **more: Any) -> StepRecord:
    domains = {"a": {"episodes": episodes, "reward": mean}}
    return record(step, {"weight": 0.5, "loss": 0.25 * step, "masked": 0.5, "domains": domains} | more)


def test_a_point_is_the_mean_over_its_steps() -> None:
    steps = [rewarded(n, 1.0 if n % 2 else 0.0, 3 if n % 2 else 1) for n in range(1, 121)]
    found = compute_curves(steps)
    assert found["reward"]["a"] == [pytest.approx(0.75)] * 60, "weighted by episodes"
    assert found["policy_loss"][0] == pytest.approx(0.375) and found["masked"][0] == 0.5
    assert found["reward_weight"][0] == 0.5 and found["cosine"] == [None] * 60
    assert found["loss"]["a"][0] == 1.0


def test_without_rewards_there_is_neither_curve_nor_plot() -> None:
    found = compute_curves([record(1, None)])
    assert not {"reward", "policy_loss", "masked", "cosine"} & set(found)
    assert reward_plots(found, ["a"]) == []


@pytest.mark.parametrize("cosine", [None, -0.25])
def test_plots(cosine: float | None) -> None:
    steps = [rewarded(n, 0.5, 2, **({} if cosine is None else {"cosine": cosine})) for n in (1, 2, 3)]
    names = [plot.name for plot in reward_plots(compute_curves(steps), ["a"])]
    assert names == ["reward", "policy-loss", "masked", *([] if cosine is None else ["cosine"])]
