"""The baseline is the mean reward of the other episodes of the same prompt in the step (RLOO, REINFORCE leave-one-out).

It does not depend on the episode's own reward, so it adds no bias to the gradient. If a prompt has a single episode, the baseline is
the mean reward of the domain's other episodes, and 0 if there are none of these either.
"""

from __future__ import annotations

from collections.abc import Sequence

from opd.credit.episodes import Episode, EqualCredit, compute_means_of_others


class LeaveOneOut(EqualCredit):
    """Implements `opd.credit.interfaces.Credit`."""

    def advantages(self, episodes: Sequence[Episode]) -> list[float]:
        by_group = compute_means_of_others(episodes, [episode.group for episode in episodes])
        by_domain = compute_means_of_others(episodes, [episode.domain for episode in episodes])
        baselines = [
            group_mean if group_mean is not None else (domain_mean or 0.0)
            for group_mean, domain_mean in zip(by_group, by_domain, strict=True)
        ]
        return [episode.reward - baseline for episode, baseline in zip(episodes, baselines, strict=True)]
