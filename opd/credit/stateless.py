"""Credit that holds nothing from step to step, and so has nothing to save."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from opd.credit.episodes import Episode, group_into_episodes, spread_over_tokens, summarise_advantages
from opd.credit.interfaces import StepCredit
from opd.records.types import Rollout, WrittenFile


class Stateless:
    """Implements `opd.credit.interfaces.Credit`, except for the advantage of each episode."""

    def advantages(self, tries: Sequence[Episode]) -> list[float]:
        """Return one advantage for each episode of a step, which all of its trained tokens share."""
        raise NotImplementedError

    def assign(self, step: int, rollouts: Sequence[Rollout]) -> StepCredit:
        tries = group_into_episodes(rollouts)
        advantages = self.advantages(tries)
        return StepCredit(advantages=spread_over_tokens(tries, advantages), readings=summarise_advantages(tries, advantages))

    def wait_ready(self) -> None:
        """Return at once."""

    def begin_save(self, path: Path) -> None:
        """Write nothing."""

    def saved(self, wait_s: float) -> Sequence[WrittenFile]:
        """Name no file."""
        return ()

    def load(self, path: Path) -> None:
        """Read nothing."""
