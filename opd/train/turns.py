"""Weights by turn: late turns of an episode, and turns after a drift, count less in the loss.

    w_n = max(floor, decay^t exp(-divergence D_t))      token n of turn t; D_t: mean of the objective before turn t
    L   = sum_n v_n w_n f_n / sum_n v_n w_n             v_n: weight of the token's row, `opd.train.totals.row_weights`

Both sums go over the whole step. The driver learns the lower one when all ranks have added up theirs, and the optimiser
divides by it as it divides by the share of quarantined rows. So the loss stays a mean, however rows are split.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from opd.records.types import Rollout
from opd.train.batch import MicroBatch


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnWeights:
    """Settings of the weights by turn; `opd.config.drift.TurnWeightsConfig` explains the fields."""

    decay: float
    divergence: float
    floor: float

    def weigh_turns(self, turn_T: Tensor, drift_T: Tensor) -> Tensor:
        """Return [T] the weights of tokens in these turns, with these mean divergences before them."""
        return (self.decay ** turn_T.double() * torch.exp(-self.divergence * drift_T)).clamp(min=self.floor)


def first_turns(rollouts: Sequence[Rollout]) -> dict[str, int]:
    """Return sample id -> number of turns of its dialogue in earlier segments, only for samples that have some.

    A sub-agent's dialogue is its own.
    """
    going_on = {rollout.next for rollout in rollouts if rollout.next is not None}
    ends: dict[str | None, int] = {}
    turns_before = {}
    for rollout in rollouts:
        goes_on = rollout.origin == "summary" or rollout.sample_id in going_on
        earlier_turns = ends.get(rollout.parent, 0) if goes_on else 0
        if earlier_turns:
            turns_before[rollout.sample_id] = earlier_turns
        ends[rollout.sample_id] = earlier_turns + max(rollout.turns, default=-1) + 1
    return turns_before


def drift_before(turn_T: Tensor, value_T: Tensor) -> Tensor:
    """Return [T] the mean value of one row's tokens in turns before each token's turn; 0 in the first turn that has any."""
    if not len(turn_T):
        return torch.zeros(0, dtype=torch.float64)
    sums = torch.bincount(turn_T, weights=value_T.double())
    counts = torch.bincount(turn_T).double()
    sums_before = sums.cumsum(0) - sums
    return (sums_before / (counts.cumsum(0) - counts).clamp(min=1))[turn_T]


def turn_factors(batch: MicroBatch, weights: Mapping[str, TurnWeights], value_N: Tensor | None) -> Tensor:
    """Return [N] the factors of a micro-batch's token weights by turn; 1 in domains without weights by turn.

    `value_N` is the objective's value; None if no domain of the batch looks at it.
    """
    lengths = list(batch.trained_lengths)
    values = torch.zeros(len(batch.turn_N)) if value_N is None else value_N
    rows = zip(batch.domains, batch.turn_N.split(lengths), values.split(lengths), strict=True)
    parts = [
        weights[domain].weigh_turns(turn_T, drift_before(turn_T, value_T))
        if domain in weights
        else torch.ones(len(turn_T), dtype=torch.float64)
        for domain, turn_T, value_T in rows
    ]
    return torch.cat(parts).float() if parts else torch.ones(0)
