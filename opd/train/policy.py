"""The policy gradient as a component of a step's loss, and the comparison of its gradient with the divergence's.

The component is a mean over all trained tokens of the step that have an advantage. A token counts the same however long its
response is, and however rows are divided among ranks and micro-batches. The divergence has a mean of its own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from opd.records.rewards import GradientSums, RewardStep
from opd.records.types import Rollout
from opd.train.batch import ADVANTAGE
from opd.train.components import Component
from opd.train.totals import weigh_rows


def make_policy_component(
    reward: RewardStep | None, rollouts: Sequence[Rollout], domain_weights: Mapping[str, float]
) -> Component | None:
    """Make the component of a step's policy gradient, for all ranks together; None if no trained token has an advantage."""
    if reward is None:
        return None
    rewarded = [rollout for rollout in rollouts if rollout.sample_id in reward.advantages]
    weights = weigh_rows(rewarded, "token_mean", domain_weights)
    if not weights:
        return None
    advantages = {i: reward.advantages[i] for i in weights}
    return Component(weights=weights, factor=reward.weight, columns={ADVANTAGE: advantages})


class GradientComparison:
    """Compares the policy gradient with the divergence's gradient. A rank accumulates only the sum of the two, so this notes by
    how much each pass with a policy gradient changes the sum."""

    def __init__(self) -> None:
        self._gradients_before: Sequence[Tensor] = ()
        self._policy: list[Tensor] = []

    def begin(self, gradients: Sequence[Tensor]) -> None:
        """Keep `gradients`, the rank's shard of the sum: one tensor per parameter. A backward pass without divergence follows."""
        self._gradients_before = gradients

    def note_after_pass(self, gradients: Sequence[Tensor]) -> None:
        """Add what that pass changed to the policy gradient; `gradients` is the rank's shard of the sum after the pass."""
        added = [new - old for new, old in zip(gradients, self._gradients_before, strict=True)]
        self._policy = [old + new for old, new in zip(self._policy, added, strict=True)] if self._policy else added
        self._gradients_before = ()

    def compare_gradients(self, gradients: Sequence[Tensor], share: float) -> GradientSums:
        """Compare the two gradients after the last pass, on this rank's shard.

        `gradients` is the sum of the two. Both are divided by `share`, as the optimiser divides the sum.
        """
        divergence_sq = policy_sq = dot = 0.0
        for total, policy in zip(gradients, self._policy, strict=True):
            divergence, policy = (total - policy).double() / share, policy.double() / share
            divergence_sq += float(divergence.square().sum())
            policy_sq += float(policy.square().sum())
            dot += float((divergence * policy).sum())
        return GradientSums(divergence_sq=divergence_sq, policy_sq=policy_sq, dot=dot)
