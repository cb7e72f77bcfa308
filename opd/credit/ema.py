"""Credit with a baseline: the running mean of a domain's rewards in earlier steps (RAE, role-conditioned advantage estimation, with
domains for roles). It is for `rollout.n: 1`, where a prompt has no other responses to be compared with.

No episode is in its own baseline, so the baseline adds no bias to the gradient. In a domain's first step there is no earlier
reward: the baseline of an episode is then the mean reward of the domain's other episodes.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from opd.credit.episodes import Episode, EqualCredit, compute_means_of_others
from opd.credit.state import read_state, write_state
from opd.records.types import WrittenFile


class EmaCredit(EqualCredit):
    """Implements `opd.credit.interfaces.Credit`."""

    def __init__(self, decay: float = 0.95) -> None:
        """`decay` is the weight of the old mean when an episode is added; 0.95 averages over about twenty episodes."""
        self._decay = decay
        self._sums: dict[str, tuple[float, float]] = {}
        """Domain -> (weighted sum of its rewards, sum of the weights), later episodes weighing more. Their quotient is the mean;
        the division keeps the first episodes from pulling it to 0."""
        self._state_files: tuple[WrittenFile, ...] = ()

    def advantages(self, episodes: Sequence[Episode]) -> list[float]:
        """Return the episodes' advantages. Only then are their rewards added to the means, so that they are in the baselines of later
        steps alone."""
        other_means = compute_means_of_others(episodes, [episode.domain for episode in episodes])
        advantages = [
            episode.reward - self._compute_baseline(episode.domain, other_mean)
            for episode, other_mean in zip(episodes, other_means, strict=True)
        ]
        self._update_means(episodes)
        return advantages

    def _compute_baseline(self, domain: str, other_mean: float | None) -> float:
        """Return the mean of the domain's earlier steps; `other_mean` if it has none, and 0 if that is None too."""
        if domain in self._sums:
            total, weight = self._sums[domain]
            return total / weight
        return 0.0 if other_mean is None else other_mean

    def _update_means(self, episodes: Sequence[Episode]) -> None:
        """Add the episodes to the means, in their order: a later one weighs more."""
        decay = self._decay
        for episode in episodes:
            total, weight = self._sums.get(episode.domain, (0.0, 0.0))
            self._sums[episode.domain] = (decay * total + (1 - decay) * episode.reward, decay * weight + (1 - decay))

    def begin_save(self, path: Path) -> None:
        self._state_files = (write_state(path, json.dumps({"sums": self._sums})),)

    def saved(self, wait_s: float) -> Sequence[WrittenFile]:
        return self._state_files  # `begin_save` has written it at once, so there is nothing to wait for

    def load(self, path: Path) -> None:
        self._sums = {domain: (total, weight) for domain, (total, weight) in read_state(path)["sums"].items()}
