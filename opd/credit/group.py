"""The baseline is the mean reward of all episodes of the same prompt in the step, the episode itself included (GRPO).

A prompt with one episode, or whose episodes all have the same reward, teaches nothing: its advantages are 0.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from statistics import fmean, stdev

from opd.credit.episodes import Episode, EqualCredit

EPSILON = 1e-6
"""Added to a standard deviation before rewards are divided by it, since it may be 0."""


class GroupCredit(EqualCredit):
    """Implements `opd.credit.interfaces.Credit`."""

    def __init__(self, divide_by_std: bool = False) -> None:
        """`divide_by_std` divides by the standard deviation of the group's rewards. It gives prompts that are nearly always or nearly never
        solved more weight, which is a bias, and no whitening is needed where rewards are in 0..1."""
        self._divide_by_std = divide_by_std

    def advantages(self, episodes: Sequence[Episode]) -> list[float]:
        rewards: dict[str, list[float]] = defaultdict(list)
        for episode in episodes:
            rewards[episode.group].append(episode.reward)
        means = {group: fmean(group_rewards) for group, group_rewards in rewards.items()}
        scales = {group: self._advantage_scale(group_rewards) for group, group_rewards in rewards.items()}
        return [(episode.reward - means[episode.group]) / scales[episode.group] for episode in episodes]

    def _advantage_scale(self, rewards: Sequence[float]) -> float:
        """Return the number by which the advantages of a group with these rewards are divided."""
        return stdev(rewards) + EPSILON if self._divide_by_std and len(rewards) > 1 else 1.0
