"""The common part of credit that holds nothing from step to step, and so has nothing to save."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from opd.credit.episodes import Episode, group_into_episodes, spread_over_tokens, summarise_advantages
from opd.credit.interfaces import StepCredit
from opd.records.types import Rollout, WrittenFile


class Stateless:
    """Implements `opd.credit.interfaces.Credit`, except for `advantages`, which a subclass gives."""

    def advantages(self, episodes: Sequence[Episode]) -> list[float]:
        """Return one advantage for each episode of a step, which all of its trained tokens share."""
        raise NotImplementedError

    def assign(self, step: int, rollouts: Sequence[Rollout]) -> StepCredit:
        episodes = group_into_episodes(rollouts)
        advantages = self.advantages(episodes)
        return StepCredit(
            advantages=spread_over_tokens(episodes, advantages), readings=summarise_advantages(episodes, advantages)
        )

    def wait_ready(self) -> None:
        """Return at once."""

    def begin_save(self, path: Path) -> None:
        """Write nothing."""

    def saved(self, wait_s: float) -> Sequence[WrittenFile]:
        """Return no files."""
        return ()

    def load(self, path: Path) -> None:
        """Read nothing."""
