"""Choose the episodes of a step that are shown to people. The choice depends on the step's rollouts alone, so a replay makes the same
one."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Literal, get_args

from opd.records.types import Rollout, TurnStop

TraceReason = Literal["best", "worst", "longest", "first"]
"""Reason why an episode is shown: its reward is the highest or the lowest of its domain in the step, it has the most sampled tokens, or it
is the first of its domain, which no criterion has picked."""

_RESPONSE_STOPS = frozenset(get_args(TurnStop))
"""Stop reasons of single responses, which are no episodes of turns."""


def group_episodes(rollouts: Iterable[Rollout]) -> dict[str, list[Rollout]]:
    """Return the segments of each episode in order, by episode id; responses of a single turn are left out."""
    episodes: dict[str, list[Rollout]] = {}
    for rollout in rollouts:
        if rollout.stop_reason not in _RESPONSE_STOPS:
            episodes.setdefault(rollout.episode, []).append(rollout)
    return episodes


def choose_episodes(episodes: Mapping[str, Sequence[Rollout]]) -> dict[str, tuple[TraceReason, ...]]:
    """Choose at most four episodes of each domain, and return the reasons for each by its id. Of several episodes that fit a reason
    equally well, the first is taken."""
    by_domain: dict[str, list[str]] = {}
    for name, segments in episodes.items():
        by_domain.setdefault(segments[0].domain, []).append(name)
    reasons: dict[str, tuple[TraceReason, ...]] = {}
    for names in by_domain.values():
        for reason, name in _choose_by_reason(names, episodes).items():
            reasons[name] = (*reasons.get(name, ()), reason)
    return reasons


def watched_samples(rollouts: Iterable[Rollout]) -> frozenset[str]:
    """Return the ids of samples whose loss is kept token by token: the segments of the chosen episodes."""
    episodes = group_episodes(rollouts)
    return frozenset(rollout.sample_id for name in choose_episodes(episodes) for rollout in episodes[name])


def _choose_by_reason(names: Sequence[str], episodes: Mapping[str, Sequence[Rollout]]) -> dict[TraceReason, str]:
    """Return the chosen episode for each reason, among the named episodes of one domain. Without rewards there is no best or worst, and
    no worst if all rewards are equal."""
    rewards = {name: reward for name in names if (reward := episodes[name][0].reward) is not None}
    picks: dict[TraceReason, str] = {}
    if rewards:
        best = max(rewards, key=rewards.__getitem__)
        worst = min(rewards, key=rewards.__getitem__)
        picks["best"] = best
        if rewards[worst] < rewards[best]:
            picks["worst"] = worst
    picks["longest"] = max(names, key=lambda name: sum(map(_count_sampled, episodes[name])))
    picks["first"] = names[0]
    return picks


def _count_sampled(rollout: Rollout) -> int:
    """Return the number of tokens that the policy sampled."""
    return sum(span.length for span in rollout.spans if span.sampled)
