"""The advantage is the reward itself. The gradient has no bias, but all the noise that a baseline would take away."""

from __future__ import annotations

from collections.abc import Sequence

from opd.credit.episodes import Episode, EqualCredit


class NoBaselineCredit(EqualCredit):
    """Implements `opd.credit.interfaces.Credit`."""

    def advantages(self, episodes: Sequence[Episode]) -> list[float]:
        return [episode.reward for episode in episodes]
