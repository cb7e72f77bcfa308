"""A budget of tokens for a response: what is longer earns a fixed reward, however good it is. Experts for low efforts learn so."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from statistics import fmean

from opd.config.reward import BudgetConfig
from opd.records.types import Rollout


def find_over_budget(segments: Sequence[tuple[Rollout, str]], budget: BudgetConfig | None) -> frozenset[str]:
    """Return the episodes with more trained tokens than the budget of their domain. `segments`: each rollout with the domain in which
    its episode began."""
    if budget is None:
        return frozenset()
    lengths: dict[str, Counter[str]] = defaultdict(Counter)
    for rollout, domain in segments:
        lengths[domain][rollout.episode] += rollout.num_trained
    return frozenset(
        episode
        for by_episode in lengths.values()
        for episode, length in by_episode.items()
        if length > _compute_limit(by_episode, budget)
    )


def _compute_limit(lengths: Mapping[str, int], budget: BudgetConfig) -> float:
    """Return the tokens that an episode may have; `lengths` are those of the domain's episodes in the step."""
    share = 0.0 if budget.share is None else budget.share * fmean(lengths.values())
    return max(share, budget.tokens or 0)
