"""The discriminator as the driver sees it: DeepSpeed ranks in Ray actors of their own. It has no weights in common with the trainer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from opd.records.types import Rollout
from opd.train.components import Component
from opd.train.discriminator_rank import DiscriminatorOptions, DiscriminatorRank
from opd.train.judging_ranks import JudgingRanks
from opd.train.ranks import RanksSpec
from opd.train.schedule import LearningRate


@dataclass(frozen=True, slots=True, kw_only=True)
class DiscriminatorSpec(RanksSpec):
    """The settings that a discriminator is started with."""

    rank: DiscriminatorOptions
    """Settings of every rank; there are `rank.world_size` ranks."""
    rate: LearningRate
    """Learning rate as a function of the step; all updates of a step have the same rate."""


class DeepSpeedDiscriminator(JudgingRanks[DiscriminatorRank]):
    """Scores answers on all ranks, and takes steps by slopes of a loss that is a function of the scores."""

    def __init__(self, spec: DiscriminatorSpec) -> None:
        super().__init__(DiscriminatorRank, spec.rank, spec, "discriminator", spec.rate)
        self._lengths: dict[str, int] = {}

    def scores(self, rows: Sequence[Rollout]) -> dict[str, float]:
        """Return sample id -> mean log-prob of the response's tokens, nats; each response has at least one.

        Raises: what `opd.cluster.wait_for_all` raises.
        """
        self._lengths = {row.sample_id: row.num_trained for row in rows}
        return self._judge_rows(DiscriminatorRank.scores, rows)

    def update(self, step: int, slopes: Mapping[str, float]) -> float:
        """Take one optimiser step on the rows of the last `scores` call. Returns the norm of the gradient.

        `slopes`: sample id -> slope of the loss by the row's score. Raises: RunError on a non-finite gradient, and what
        `opd.cluster.wait_for_all` raises.
        """
        # The score is the mean of log p, the ranks sum weights times -log p. DeepSpeed averages gradients over ranks.
        weights = {i: -slope / self._lengths[i] * len(self._ranks) for i, slope in slopes.items()}
        return self._update_ranks(DiscriminatorRank.update, step, Component(weights=weights))[0]
