"""Weights by turn: late turns of an episode, and turns after a drift, count less in the loss.

    w_n = max(floor, decay^t exp(-divergence D_t))      token n of turn t; D_t: mean of the objective before turn t
    L   = sum_n v_n w_n f_n / sum_n v_n w_n             v_n: weight of the token's row, `opd.train.totals.weigh_rows`

Both sums go over the whole step. The driver knows the lower one only after the last micro-batch, when it adds up the sums of all
ranks. The optimiser then divides the gradients by it, as it would else divide them by the share of the weight that was scored. So
the loss is a mean, however rows are divided among ranks.
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
        """Return [T] the weight of each token, from the number of its turn and the mean divergence in the turns before."""
        return (self.decay ** turn_T.double() * torch.exp(-self.divergence * drift_T)).clamp(min=self.floor)


def count_earlier_turns(rollouts: Sequence[Rollout]) -> dict[str, int]:
    """Return sample id -> number of turns that its dialogue had in earlier segments; samples without such turns are left out.

    A parent stands before its successors in `rollouts`. A sub-agent begins a dialogue of its own.
    """
    going_on = {rollout.next for rollout in rollouts if rollout.next is not None}
    ends: dict[str | None, int] = {}
    """Sample id -> turns of its dialogue up to its end."""
    turns_before = {}
    for rollout in rollouts:
        goes_on = rollout.origin == "summary" or rollout.sample_id in going_on
        earlier_turns = ends.get(rollout.parent, 0) if goes_on else 0
        if earlier_turns:
            turns_before[rollout.sample_id] = earlier_turns
        ends[rollout.sample_id] = earlier_turns + max(rollout.turns, default=-1) + 1
    return turns_before


def compute_drift_before(turn_T: Tensor, value_T: Tensor) -> Tensor:
    """Return [T] for each token of one row the mean value of the row's tokens in earlier turns; 0 if there are no such tokens."""
    if not len(turn_T):
        return torch.zeros(0, dtype=torch.float64)
    sums = torch.bincount(turn_T, weights=value_T.double())
    counts = torch.bincount(turn_T).double()
    sums_before = sums.cumsum(0) - sums
    return (sums_before / (counts.cumsum(0) - counts).clamp(min=1))[turn_T]


def compute_turn_factors(batch: MicroBatch, weights: Mapping[str, TurnWeights], value_N: Tensor | None) -> Tensor:
    """Return [N] the factor that each token's weight gets for its turn; 1 in domains that are not in `weights`.

    `value_N`: the objective's value at each token; None if no domain's weights depend on it.
    """
    lengths = list(batch.trained_lengths)
    values = torch.zeros(len(batch.turn_N)) if value_N is None else value_N
    rows = zip(batch.domains, batch.turn_N.split(lengths), values.split(lengths), strict=True)
    parts = [
        weights[domain].weigh_turns(turn_T, compute_drift_before(turn_T, value_T))
        if domain in weights
        else torch.ones(len(turn_T), dtype=torch.float64)
        for domain, turn_T, value_T in rows
    ]
    return torch.cat(parts).float() if parts else torch.ones(0)
