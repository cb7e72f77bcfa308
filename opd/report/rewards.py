"""Curves of a merge's rewards, and their plots. A merge without rewards has none."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from opd.records.rewards import RewardRecord
from opd.records.step import StepRecord
from opd.records.sums import mean_or_none

if TYPE_CHECKING:  # it imports matplotlib, which report.json does not need
    from opd.report.drawing import Plot

STEP_CURVES = {"policy_loss": "loss", "masked": "masked", "reward_weight": "weight", "cosine": "cosine"}
"""Curve over all domains -> field of a step's reward record."""


def reward_curves(points: Sequence[Sequence[StepRecord]], domains: Sequence[str]) -> dict[str, Any]:
    """Return the curves by name; empty for a merge without rewards. `points`: groups of steps, one for each point of a curve.

    `reward`, by domain, is the mean over the episodes. policy_loss, masked, reward_weight and cosine are means over the
    steps, null if no step has the number. explained_variance, only with a critic, is its share of the returns' variance.
    """
    rewards = [[record.reward for record in part if record.reward is not None] for part in points]
    if not any(rewards):
        return {}
    curves: dict[str, Any] = {"reward": {name: [_mean_reward(part, name) for part in rewards] for name in domains}}
    for curve, key in STEP_CURVES.items():
        curves[curve] = [mean_or_none(getattr(record, key) for record in part) for part in rewards]
    explained = [mean_or_none(record.credit.get("explained_variance") for record in part) for part in rewards]
    return curves | ({"explained_variance": explained} if any(value is not None for value in explained) else {})


def _mean_reward(part: Sequence[RewardRecord], domain: str) -> float | None:
    entries = [record.domains[domain] for record in part if domain in record.domains]
    episodes = sum(entry.episodes for entry in entries)
    return sum(entry.reward * entry.episodes for entry in entries) / episodes if episodes else None


def reward_plots(curves: Mapping[str, Any], names: Sequence[str]) -> list[Plot]:
    """Plot the reward by domain, and the numbers of the policy gradient beside the divergence."""
    from opd.report import figures

    if "reward" not in curves:
        return []
    gap = [None] * len(curves["step"])
    by_domain = {name: curves["reward"].get(name, gap) for name in names}
    plots = [
        figures.draw_by_domain("reward", "Reward of the student's responses", curves, by_domain, label="mean"),
        _draw_curves("policy-loss", "Loss of the policy gradient", curves, "policy_loss", label="nats a token"),
        _draw_curves(
            "masked", "Tokens too far from what was sampled to be trained on a reward", curves, "masked", percent=True
        ),
    ]
    if "explained_variance" in curves:
        title = "Share of the returns' variance that the critic explains"
        plots.append(_draw_curves("explained-variance", title, curves, "explained_variance", percent=True))
    if any(value is not None for value in curves["cosine"]):
        title = "Cosine of the gradients of divergence and reward"
        plots.append(_draw_curves("cosine", title, curves, "cosine", markers=True))
    return plots


def _draw_curves(name: str, title: str, curves: Mapping[str, Any], key: str, **options: Any) -> Plot:
    from opd.report import figures

    return figures.draw_lines(name, title, curves, {name: ("expert", curves[key])}, **options)
