"""The episodes of a step, each of which is one or more rollouts that share one outcome.

A baseline compares outcomes, so it counts episodes. The segments of an episode are not independent: if each of them counted, an
episode that was compacted three times would weigh four times as much, and its own reward would be in its baseline.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING

import numpy as np

from opd.credit.interfaces import StepCredit
from opd.records.types import Rollout, StopReason, WrittenFile

if TYPE_CHECKING:
    from opd.credit.interfaces import Floats

FLAT_ADVANTAGE = 1e-9
"""An advantage whose size is below this is 0 but for rounding."""


@dataclass(frozen=True, slots=True)
class Episode:
    """The segments of one episode with its outcome."""

    segments: tuple[Rollout, ...]
    """Segments in the order of the step; at least one."""
    reward: float

    @property
    def domain(self) -> str:
        return self.segments[0].domain

    @property
    def group(self) -> str:
        """Shared by all episodes of one prompt in a step."""
        return self.segments[0].group

    @property
    def stop_reason(self) -> StopReason:
        return self.segments[0].stop_reason

    @property
    def num_trained(self) -> int:
        """Trained tokens of all segments."""
        return sum(segment.num_trained for segment in self.segments)


def group_into_episodes(rollouts: Iterable[Rollout]) -> list[Episode]:
    """Return the episodes that have a reward, in the order of their first segments."""
    segments: dict[str, list[Rollout]] = defaultdict(list)
    for rollout in rollouts:
        segments[rollout.episode].append(rollout)
    episodes = []
    for name, episode_segments in segments.items():
        rewards = {segment.reward for segment in episode_segments}
        assert len(rewards) == 1, f"the segments of episode {name} have the rewards {rewards}"
        (reward,) = rewards
        if reward is not None:
            episodes.append(Episode(tuple(episode_segments), reward))
    return episodes


def compute_means_of_others(episodes: Sequence[Episode], keys: Sequence[str]) -> list[float | None]:
    """Return for each episode the mean reward of the other episodes with the same key; None if there is no other. `keys`: one for
    each episode."""
    rewards: dict[str, list[float]] = defaultdict(list)
    for key, episode in zip(keys, episodes, strict=True):
        rewards[key].append(episode.reward)
    return [
        (sum(rewards[key]) - episode.reward) / (len(rewards[key]) - 1) if len(rewards[key]) > 1 else None
        for key, episode in zip(keys, episodes, strict=True)
    ]


class EqualCredit:
    """Implements `opd.credit.interfaces.Credit` for kinds that give all tokens of an episode one advantage, except for `advantages`, which
    a subclass gives. It holds nothing from step to step, and so has nothing to save."""

    def advantages(self, episodes: Sequence[Episode]) -> list[float]:
        """Return one advantage for each episode of a step, which all of its trained tokens share."""
        raise NotImplementedError

    def assign(self, step: int, rollouts: Sequence[Rollout]) -> StepCredit:
        """Repeat each episode's advantage for each of its trained tokens. The readings are the mean reward, and the share of episodes that
        teach nothing because their advantage is 0."""
        episodes = group_into_episodes(rollouts)
        advantages = self.advantages(episodes)
        token_advantages: dict[str, Floats] = {
            segment.sample_id: np.full(segment.num_trained, advantage, np.float32)
            for episode, advantage in zip(episodes, advantages, strict=True)
            for segment in episode.segments
        }
        if not episodes:
            return StepCredit(advantages=token_advantages)
        flat = sum(abs(advantage) < FLAT_ADVANTAGE for advantage in advantages) / len(episodes)
        readings = {"mean_return": fmean(episode.reward for episode in episodes), "flat": flat}
        return StepCredit(advantages=token_advantages, readings=readings)

    def wait_ready(self) -> None:
        """Return at once."""

    def begin_save(self, path: Path) -> None:
        """Write nothing."""

    def saved(self, wait_s: float) -> Sequence[WrittenFile]:
        """Return no files."""
        return ()

    def load(self, path: Path) -> None:
        """Read nothing."""
