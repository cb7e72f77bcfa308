"""The policy gradient's component of a step, and its gradient beside the divergence's.

Its mean is over the trained tokens that have an advantage, of the whole step: a token counts the same however long its response
is, and however rows are cut into ranks and micro-batches. The divergence has a mean of its own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from opd.records.rewards import GradientSums, RewardStep
from opd.records.types import Rollout
from opd.train.batch import ADVANTAGE
from opd.train.components import Component
from opd.train.totals import compute_row_weights


def make_policy_component(
    reward: RewardStep | None, rollouts: Sequence[Rollout], domain_weights: Mapping[str, float]
) -> Component | None:
    """Return the policy gradient of a step, of all ranks; None if no trained token has an advantage."""
    if reward is None:
        return None
    rewarded = [rollout for rollout in rollouts if rollout.sample_id in reward.advantages]
    weights = compute_row_weights(rewarded, "token_mean", domain_weights)
    if not weights:
        return None
    advantages = {i: reward.advantages[i] for i in weights}
    return Component(weights=weights, factor=reward.weight, columns={ADVANTAGE: advantages})


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
