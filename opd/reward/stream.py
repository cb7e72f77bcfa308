"""The reward's part of each step: judging, credit, weight and record."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import correlation, fmean
from typing import TYPE_CHECKING

import numpy as np

from opd.config.reward import RewardConfig
from opd.credit.interfaces import Credit
from opd.interfaces import TextExperts
from opd.records.episodes import BROKEN
from opd.records.rewards import DomainReward, PolicyReport, PolicyStats, RewardRecord, RewardStep, compare_gradients
from opd.records.types import Prompt, Rollout, RolloutBatch
from opd.reward.budget import find_over_budget
from opd.reward.preference import PreferenceRewards
from opd.reward.verified import Failure, VerifiedRewards

if TYPE_CHECKING:
    from opd.credit.interfaces import Floats

CREDIT = "credit"
"""Directory of a checkpoint in which the credit's state lies."""
PREFERENCE = "preference"
"""Directory of a checkpoint in which the discriminator's state lies."""
NO_STATS = PolicyStats(tokens=0, loss_sum=0.0, masked=0)


class RewardStream:
    """Implements `opd.interfaces.Rewards`."""

    def __init__(
        self,
        config: RewardConfig,
        domains: Collection[str],
        verified: VerifiedRewards,
        credit: Credit,
        preference: PreferenceRewards | None = None,
        texts: TextExperts | None = None,
    ) -> None:
        """Keep the settings: `domains` take part; `preference` judges those that it names, `verified` the others without an
        environment. `texts`: experts whose answers, in the place of responses, have no reward."""
        self._config = config
        self._domains = frozenset(domains)
        self._verified = verified
        self._credit = credit
        self._preference = preference
        self._texts = texts
        self._failures: list[Failure] = []
        self._step_work = RewardStep(weight=0.0, advantages={})
        self._readings: Mapping[str, float] = {}

    def judged(self, batch: RolloutBatch, prompts: Sequence[Prompt]) -> RolloutBatch:
        written = [rollout for rollout in batch.rollouts if not self._is_taught(rollout)]
        judged, self._failures = self._verified.add_rewards(replace(batch, rollouts=tuple(written)), prompts)
        preferred = self._preference.judge(written) if self._preference else {}
        segments = self._select_segments(judged.rollouts)
        over_budget = find_over_budget(segments, self._config.budget)
        rewards = {rollout.sample_id: rollout.reward for rollout in judged.rollouts}
        for rollout, domain in segments:
            is_preferred = self._preference is not None and domain in self._preference.domains
            # While the discriminator learns alone, it says nothing of any response.
            reward = preferred.get(rollout.sample_id) if is_preferred else rollout.reward or 0.0
            if rollout.stop_reason in BROKEN:
                # Not the student's fault, whatever it had earned by then: if only those counted that had earned something, the others'
                # mean would be too high. A game that is lost says nothing and earned 0, as in an exam.
                reward = None
            elif reward is not None and self._config.budget is not None and rollout.episode in over_budget:
                reward = self._config.budget.reward
            rewards[rollout.sample_id] = reward
        rollouts = tuple(
            replace(r, reward=rewards.get(r.sample_id, r.reward))
            for r in batch.rollouts
            if r.sample_id in rewards or self._is_taught(r)  # a judge may have given no score
        )
        return replace(batch, rollouts=rollouts, quarantined=judged.quarantined)

    def step(self, step: int, rollouts: Sequence[Rollout]) -> RewardStep:
        taking_part = [rollout for rollout, _ in self._select_segments(rollouts)]
        assigned = self._credit.assign(step, taking_part)
        every = self._config.compare_every
        learned = self._preference.learn(step, rollouts) if self._preference else {}
        self._readings = {**assigned.readings, **learned}
        self._step_work = RewardStep(
            weight=self._config.weight_at(step) if assigned.warm else 0.0,
            advantages=penalise_turns(assigned.advantages, taking_part, self._config.penalty) if assigned.warm else {},
            compare=assigned.warm and every > 0 and step % every == 0,
            waits=not assigned.warm,
        )
        return self._step_work

    def record(self, rollouts: Sequence[Rollout], trained: PolicyReport | None) -> RewardRecord:
        failures, self._failures = self._failures, []
        sums = trained.domains if trained else {}
        total = sum(sums.values(), NO_STATS)
        rewards: dict[str, dict[str, float]] = defaultdict(dict)
        lengths: dict[str, Counter[str]] = defaultdict(Counter)
        for rollout, domain in self._select_segments(rollouts):
            if rollout.reward is not None:
                rewards[domain][rollout.episode] = rollout.reward
                lengths[domain][rollout.episode] += rollout.num_trained
        return RewardRecord(
            weight=self._step_work.weight,
            loss=trained.loss if trained else 0.0,
            masked=total.masked / max(1, total.tokens),
            domains={
                domain: _summarise_domain(
                    list(rewards[domain].values()),
                    list(lengths[domain].values()),
                    sums.get(domain, NO_STATS),
                    [failure.error for failure in failures if failure.domain == domain],
                )
                for domain in sorted({*rewards, *sums})
            },
            credit=dict(self._readings),
            judges={domain: judge.sum_spending() for domain, judge in self._verified.list_judges().items()},
            **compare_gradients(trained.compared if trained else None),
        )

    def load(self, checkpoint: Path) -> None:
        self._credit.load(checkpoint / CREDIT)
        if self._preference is not None:
            self._preference.load(checkpoint / PREFERENCE)

    def _is_taught(self, rollout: Rollout) -> bool:
        return self._texts is not None and self._texts.is_taught(rollout)

    def _select_segments(self, rollouts: Sequence[Rollout]) -> list[tuple[Rollout, str]]:
        """Return segment and domain of the episodes that began in one of the domains, whatever domain the segment itself has."""
        began: dict[str, str] = {}
        for rollout in rollouts:
            began.setdefault(rollout.episode, rollout.domain)
        return [(r, began[r.episode]) for r in rollouts if began[r.episode] in self._domains and not self._is_taught(r)]


def penalise_turns(
    advantages: Mapping[str, Floats], rollouts: Sequence[Rollout], penalty: float
) -> Mapping[str, Floats]:
    """Set the advantage to `-penalty` for each token of a turn that the guard blocked and that rewards count against. The
    baseline does not change: an episode's reward is what it earned."""
    penalised = dict(advantages)
    for rollout in rollouts:
        spans = [span for span in rollout.spans if span.trained]
        if rollout.sample_id in penalised and any(span.origin == "blocked" for span in spans):
            # [N] over the trained tokens, as advantages are.
            blocked_N = np.repeat([span.origin == "blocked" for span in spans], [span.length for span in spans])
            penalised[rollout.sample_id] = np.where(blocked_N, np.float32(-penalty), penalised[rollout.sample_id])
    return penalised


def _summarise_domain(
    rewards: Sequence[float], lengths: Sequence[int], sums: PolicyStats, errors: Sequence[str]
) -> DomainReward:
    """Return the domain's record; `rewards` and `lengths`, in trained tokens, are those of its episodes."""
    varies = len({*rewards}) > 1 and len({*lengths}) > 1
    return DomainReward(
        episodes=len(rewards),
        reward=fmean(rewards) if rewards else 0.0,
        length_correlation=correlation(rewards, lengths) if varies else None,
        tokens=sums.tokens,
        loss=sums.loss_sum / max(1, sums.tokens),
        masked=sums.masked / max(1, sums.tokens),
        failed=len(errors),
        error=errors[0] if errors else "",
    )
