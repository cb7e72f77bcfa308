"""The baseline is the mean reward of the other tries at the same prompt (RLOO).

It does not depend on the try itself, so it takes nothing from the gradient's mean. A prompt that was tried once has no other
try: there the other episodes of its domain stand in, and where the step has no other either, the baseline is 0.
"""

from __future__ import annotations

from collections.abc import Sequence

from opd.credit.episodes import Episode, mean_of_others
from opd.credit.stateless import Stateless


class LeaveOneOut(Stateless):
    """Implements `opd.credit.interfaces.Credit`."""

    def advantages(self, tries: Sequence[Episode]) -> list[float]:
        by_group = mean_of_others(tries, [episode.group for episode in tries])
        by_domain = mean_of_others(tries, [episode.domain for episode in tries])
        return [
            episode.reward - next((mean for mean in means if mean is not None), 0.0)
            for episode, means in zip(tries, zip(by_group, by_domain, strict=True), strict=True)
        ]
