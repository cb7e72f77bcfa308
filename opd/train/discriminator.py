"""The discriminator as the driver sees it: DeepSpeed ranks in Ray actors of their own. It has no weights in common with the trainer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from opd import cluster
from opd.records.types import Rollout
from opd.train.components import Component
from opd.train.discriminator_rank import DiscriminatorOptions, DiscriminatorRank, PreferenceWork
from opd.train.ranks import Ranks, RanksSpec
from opd.train.schedule import LearningRate


@dataclass(frozen=True, slots=True, kw_only=True)
class DiscriminatorSpec(RanksSpec):
    """The settings that a discriminator is started with."""

    rank: DiscriminatorOptions
    """Settings of every rank; there are `rank.world_size` ranks."""
    rate: LearningRate
    """Learning rate as a function of the step; all updates of a step have the same rate."""


class DeepSpeedDiscriminator(Ranks[DiscriminatorRank]):
    """Scores answers on all ranks, and takes steps by slopes of a loss that is a function of the scores."""

    def __init__(self, spec: DiscriminatorSpec) -> None:
        super().__init__(DiscriminatorRank, spec.rank, spec, "discriminator")
        self._rate = spec.rate
        self._plan: list[list[list[str]]] = []
        """[rank][micro-batch] sample ids of the last `scores` call, which `update` needs again."""
        self._lengths: dict[str, int] = {}

    def scores(self, rows: Sequence[Rollout]) -> dict[str, float]:
        """Return sample id -> mean log-prob of the response's tokens, nats; each response has at least one.

        Raises: what `opd.cluster.wait_for_all` raises.
        """
        by_id = {row.sample_id: row for row in rows}
        self._lengths = {sample_id: row.num_trained for sample_id, row in by_id.items()}
        self._plan = self.plan_micro_batches(rows)
        pending = [
            rank.submit(DiscriminatorRank.scores, [[by_id[i] for i in ids] for ids in part])
            for rank, part in zip(self._ranks, self._plan, strict=True)
        ]
        return {i: s for part in cluster.wait_for_all(pending, timeout_s=self._timeout_s) for i, s in part.items()}

    def update(self, step: int, slopes: Mapping[str, float]) -> float:
        """Take one optimiser step on the rows of the last `scores` call. Returns the norm of the gradient.

        `slopes`: sample id -> slope of the loss by the row's score. Raises: RunError on a non-finite gradient, and what
        `opd.cluster.wait_for_all` raises.
        """
        # The score is the mean of log p, the ranks sum weights times -log p. DeepSpeed averages gradients over ranks.
        weights = {i: -slope / self._lengths[i] * len(self._ranks) for i, slope in slopes.items()}
        lr, whole = self._rate.rate_at_step(step), Component(weights=weights)
        pending = []
        for rank, part in zip(self._ranks, self._plan, strict=True):
            component = whole.select_samples([i for ids in part for i in ids])
            pending.append(rank.submit(DiscriminatorRank.update, PreferenceWork(step=step, lr=lr, component=component)))
        return cluster.wait_for_all(pending, timeout_s=self._timeout_s)[0]
