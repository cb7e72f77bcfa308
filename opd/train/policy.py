"""The policy gradient's part of an optimiser step: its weights, its tokens, its sums, and its gradient beside the divergence's.

Its mean is over the trained tokens that have an advantage, of the whole step: a token counts the same however long its response
is, and however rows are cut into ranks and micro-batches. The divergence has a mean of its own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from opd.losses.chunked import RewardedStats
from opd.records.rewards import GradientSums, PolicyStats, RewardStep
from opd.records.sums import add_to_sums
from opd.records.types import Rollout
from opd.train.batch import MicroBatch
from opd.train.totals import row_weights, token_weights

if TYPE_CHECKING:
    from opd.credit.interfaces import Floats


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyWork:
    """The policy gradient of one optimiser step, of all ranks or of one."""

    weight: float
    """Factor of the policy gradient's mean, beside the divergence's mean."""
    weights: Mapping[str, float]
    """Sample id -> weight of each of its trained tokens in the policy gradient's own mean."""
    advantages: Mapping[str, Floats]
    """Sample id -> [N] advantage of each trained token."""
    compare: bool = False
    """Compute the gradients of policy and divergence one after the other, so as to compare them."""

    def select_samples(self, sample_ids: Sequence[str]) -> PolicyWork:
        """Return the part of these samples."""
        weighted_ids = [i for i in sample_ids if i in self.weights]
        return replace(
            self,
            weights={i: self.weights[i] for i in weighted_ids},
            advantages={i: self.advantages[i] for i in weighted_ids},
        )

    def token_advantages(self, batch: MicroBatch, sample_ids: Sequence[str]) -> tuple[Tensor, Tensor]:
        """Return advantage_N and weight_N of a micro-batch with these samples; 0 for samples that take no part.

        The weights are those of the policy gradient's own mean.
        """
        columns = [
            torch.from_numpy(self.advantages[i]) if i in self.advantages else torch.zeros(length)
            for i, length in zip(sample_ids, batch.row_lengths, strict=True)
        ]
        assert tuple(len(column) for column in columns) == batch.row_lengths
        advantage_N = torch.cat(columns) if columns else torch.zeros(0)
        return advantage_N, token_weights(batch, [self.weights.get(i, 0.0) for i in sample_ids])


def policy_work(
    reward: RewardStep | None, rollouts: Sequence[Rollout], domain_weights: Mapping[str, float]
) -> PolicyWork | None:
    """Return the policy gradient's work of all ranks; None if no trained token has an advantage."""
    if reward is None:
        return None
    rewarded = [rollout for rollout in rollouts if rollout.sample_id in reward.advantages]
    weights = row_weights(rewarded, "token_mean", domain_weights)
    if not weights:
        return None
    advantages = {i: reward.advantages[i] for i in weights}
    return PolicyWork(weight=reward.weight, weights=weights, advantages=advantages, compare=reward.compare)


@dataclass(frozen=True, slots=True, kw_only=True)
class RankPolicy:
    """Sums over one rank's tokens that have an advantage."""

    loss: float
    """This rank's share of the weighted sum."""
    weight: float
    """The weights of its tokens; those of all ranks add up to 1 if every row was scored."""
    domains: Mapping[str, PolicyStats]
    compared: GradientSums | None = None


class PolicyTotals:
    """Sums over a rank's micro-batches."""

    def __init__(self) -> None:
        self.loss = 0.0
        self.weight = 0.0
        self.domains: dict[str, PolicyStats] = {}

    def add(self, batch: MicroBatch, weight_N: Tensor, stats: RewardedStats) -> None:
        """Add one micro-batch; `weight_N` as in the policy gradient's own mean."""
        rewarded_N = weight_N != 0
        value_N = torch.where(rewarded_N, stats.policy_N.float(), 0.0)
        self.loss += float((value_N * weight_N).sum())
        self.weight += float(weight_N.sum())
        lengths = list(batch.row_lengths)
        masked_N = (stats.masked_N != 0) & rewarded_N
        parts = zip(value_N.split(lengths), masked_N.split(lengths), rewarded_N.split(lengths), strict=True)
        for domain, (value, masked, rewarded) in zip(batch.domains, parts, strict=True):
            tokens = int(rewarded.sum())
            if tokens:
                row = PolicyStats(tokens=tokens, loss_sum=float(value.sum()), masked=int(masked.sum()))
                add_to_sums(self.domains, domain, row)


class GradientComparison:
    """Separates the policy gradient from the divergence's gradient, of which a rank accumulates only the sum."""

    def __init__(self) -> None:
        self._gradients_before: Sequence[Tensor] = ()
        self._policy: list[Tensor] = []

    def begin(self, gradients: Sequence[Tensor]) -> None:
        """Keep the rank's shard of the sum, by parameter: a backward pass of the policy gradient alone follows."""
        self._gradients_before = gradients

    def note_after_pass(self, gradients: Sequence[Tensor]) -> None:
        """Add the change that this pass made, from the rank's shard of the sum after it."""
        added = [new - old for new, old in zip(gradients, self._gradients_before, strict=True)]
        self._policy = [old + new for old, new in zip(self._policy, added, strict=True)] if self._policy else added
        self._gradients_before = ()

    def compare_gradients(self, gradients: Sequence[Tensor], share: float) -> GradientSums:
        """Compare the two once all passes are done; `gradients` is the sum, which the optimiser divides by `share`."""
        divergence_sq = policy_sq = dot = 0.0
        for total, policy in zip(gradients, self._policy, strict=True):
            divergence, own = (total - policy).double() / share, policy.double() / share
            divergence_sq += float(divergence.square().sum())
            policy_sq += float(own.square().sum())
            dot += float((divergence * own).sum())
        return GradientSums(divergence_sq=divergence_sq, policy_sq=policy_sq, dot=dot)
