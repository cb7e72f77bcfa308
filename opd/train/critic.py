"""The critic as the driver sees it: DeepSpeed ranks in Ray actors of their own. It has no weights in common with the trainer.

Shapes: N trained tokens of a sample.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from opd.records.types import Rollout
from opd.train.batch import OLD_VALUE, RETURN
from opd.train.components import Component
from opd.train.critic_rank import CriticOptions, CriticRank
from opd.train.judging_ranks import JudgingRanks
from opd.train.ranks import RanksSpec
from opd.train.schedule import LearningRate

if TYPE_CHECKING:
    from opd.credit.interfaces import Floats


@dataclass(frozen=True, slots=True, kw_only=True)
class CriticEngineSpec(RanksSpec):
    """The settings that a critic's engine is started with."""

    rank: CriticOptions
    """Settings of every rank; there are `rank.world_size` ranks."""
    rate: LearningRate
    """Learning rate as a function of the step; all updates of a step have the same rate."""


class DeepSpeedCritic(JudgingRanks[CriticRank]):
    """Computes the values of a step's states on all ranks, and updates the critic toward the step's returns."""

    def __init__(self, spec: CriticEngineSpec) -> None:
        super().__init__(CriticRank, spec.rank, spec, "critic", spec.rate)

    def values(self, rollouts: Sequence[Rollout]) -> dict[str, Floats]:
        """Return sample id -> [N + 1] the value of the state before each trained token, and of the state behind the last token.

        Raises: what `opd.cluster.wait_for_all` raises.
        """
        return self._judge_rows(CriticRank.values, rollouts)

    def update(self, step: int, returns: Mapping[str, Floats], old_values: Mapping[str, Floats]) -> tuple[float, float]:
        """Take one optimiser step toward the returns of the rollouts of the last `values` call.

        `returns` and `old_values`: sample id -> [N] a number for the state before each trained token; `old_values` are the critic's
        own, from before the step's first update. Returns the mean squared error before this update, and the norm of the gradient.
        Raises: RunError on a non-finite gradient, and what `opd.cluster.wait_for_all` raises.
        """
        tokens = sum(map(len, returns.values()))
        # The loss is the mean over all tokens. DeepSpeed averages gradients over ranks, and the number of ranks cancels that.
        weight = 1 / tokens * len(self._ranks)
        all_ranks = Component(weights=dict.fromkeys(returns, weight), columns={RETURN: returns, OLD_VALUE: old_values})
        results = self._update_ranks(CriticRank.update, step, all_ranks)
        return sum(result.loss for result in results), results[0].grad_norm
