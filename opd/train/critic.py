"""The critic as the driver sees it: DeepSpeed ranks in Ray actors of their own. It has no weights in common with the trainer.

Shapes: N trained tokens of a sample.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from opd import cluster
from opd.records.types import Rollout
from opd.train.batch import OLD_VALUE, RETURN
from opd.train.components import Component
from opd.train.critic_rank import CriticOptions, CriticRank, UpdateWork
from opd.train.ranks import Ranks, RanksSpec
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


class DeepSpeedCritic(Ranks[CriticRank]):
    """Computes the values of a step's states on all ranks, and updates the critic toward the step's returns."""

    def __init__(self, spec: CriticEngineSpec) -> None:
        super().__init__(CriticRank, spec.rank, spec, "critic")
        self._rate = spec.rate
        self._plan: list[list[list[str]]] = []
        """[rank][micro-batch] sample ids of the last `values` call, which `update` needs again."""

    def values(self, rollouts: Sequence[Rollout]) -> dict[str, Floats]:
        """Return sample id -> [N + 1] the value of the state before each trained token, and of the state behind the last token.

        Raises: what `opd.cluster.wait_for_all` raises.
        """
        by_id = {rollout.sample_id: rollout for rollout in rollouts}
        self._plan = self.plan_micro_batches(rollouts)
        pending = [
            rank.submit(CriticRank.values, [[by_id[i] for i in ids] for ids in part])
            for rank, part in zip(self._ranks, self._plan, strict=True)
        ]
        values_by_sample: dict[str, Floats] = {}
        for answer in cluster.wait_for_all(pending, timeout_s=self._timeout_s):
            values_by_sample |= answer
        return values_by_sample

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
        lr = self._rate.rate_at_step(step)
        pending = []
        for rank, part in zip(self._ranks, self._plan, strict=True):
            work = UpdateWork(step=step, lr=lr, component=all_ranks.select_samples([i for ids in part for i in ids]))
            pending.append(rank.submit(CriticRank.update, work))
        results = cluster.wait_for_all(pending, timeout_s=self._timeout_s)
        return sum(result.loss for result in results), results[0].grad_norm
