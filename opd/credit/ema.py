"""The baseline is a running mean of a domain's rewards in the steps before (RAE): for one try at each prompt.

No episode of a step is in the baseline of the step, so it takes nothing from the gradient's mean. In a domain's first step
the other episodes of the domain stand in.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from opd.credit.episodes import Episode, group_into_episodes, mean_of_others, spread_over_tokens, summarise_advantages
from opd.credit.interfaces import StepCredit
from opd.credit.state import read_state, write_state
from opd.records.types import Rollout, WrittenFile


@dataclass(frozen=True, slots=True, kw_only=True)
class EmaSpec:
    """Settings of the running mean."""

    decay: float = 0.95
    """Weight of the old mean when an episode is added; 0.95 averages over about twenty episodes."""


class EmaCredit:
    """Implements `opd.credit.interfaces.Credit`."""

    def __init__(self, spec: EmaSpec) -> None:
        self._spec = spec
        self._sums: dict[str, tuple[float, float]] = {}
        """Domain -> sum of its rewards up to the last step, the newest most, and the same sum of ones: the mean's two halves."""
        self._written: tuple[WrittenFile, ...] = ()

    def assign(self, step: int, rollouts: Sequence[Rollout]) -> StepCredit:
        tries = group_into_episodes(rollouts)
        other_means = mean_of_others(tries, [episode.domain for episode in tries])
        advantages = [
            episode.reward - self._domain_baseline(episode.domain, other_mean)
            for episode, other_mean in zip(tries, other_means, strict=True)
        ]
        # After the advantages: no episode of a step is in the step's own baseline.
        self._update_means(tries)
        return StepCredit(advantages=spread_over_tokens(tries, advantages), readings=summarise_advantages(tries, advantages))

    def _domain_baseline(self, domain: str, other_mean: float | None) -> float:
        """Return the mean of the steps before; without any, `other_mean`, and 0 if that is None."""
        if domain in self._sums:
            total, weight = self._sums[domain]
            return total / weight
        return 0.0 if other_mean is None else other_mean

    def _update_means(self, tries: Sequence[Episode]) -> None:
        decay = self._spec.decay
        for episode in tries:
            total, weight = self._sums.get(episode.domain, (0.0, 0.0))
            self._sums[episode.domain] = (decay * total + (1 - decay) * episode.reward, decay * weight + (1 - decay))

    def wait_ready(self) -> None:
        """Return at once."""

    def begin_save(self, path: Path) -> None:
        self._written = (write_state(path, json.dumps({"sums": self._sums})),)

    def saved(self, wait_s: float) -> Sequence[WrittenFile]:
        return self._written

    def load(self, path: Path) -> None:
        self._sums = {domain: (total, weight) for domain, (total, weight) in read_state(path)["sums"].items()}
