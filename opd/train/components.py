"""Components of a step's loss as the driver weighs them: a rank turns them into tensors, and knows no method behind them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from opd.train.batch import MicroBatch
from opd.train.totals import token_weights

if TYPE_CHECKING:
    from opd.credit.interfaces import Floats


@dataclass(frozen=True, slots=True, kw_only=True)
class Component:
    """One part of a loss, of all ranks or of one: a weighted sum over tokens."""

    weights: Mapping[str, float]
    """Sample id -> weight of each of its trained tokens; over all ranks they make the part a mean of its own. A sample that is
    not in it takes no part."""
    factor: float = 1.0
    """Factor of that mean in the loss."""
    columns: Mapping[str, Mapping[str, Floats]] = field(default_factory=dict)
    """Name -> sample id -> [N] a number of each trained token."""

    def of(self, sample_ids: Sequence[str]) -> Component:
        """Return the part of these samples."""
        ids = [i for i in sample_ids if i in self.weights]
        columns = {name: {i: column[i] for i in ids} for name, column in self.columns.items()}
        return replace(self, weights={i: self.weights[i] for i in ids}, columns=columns)

    def token_weights(self, batch: MicroBatch, sample_ids: Sequence[str]) -> Tensor:
        """Return [N] the weights of a micro-batch with these samples, without the factor."""
        return token_weights(batch, [self.weights.get(i, 0.0) for i in sample_ids])

    def token_columns(self, batch: MicroBatch, sample_ids: Sequence[str]) -> dict[str, Tensor]:
        """Return name -> [N] the columns of a micro-batch with these samples; 0 for samples that take no part."""
        return {name: _join_rows(column, batch.trained_lengths, sample_ids) for name, column in self.columns.items()}


def _join_rows(column: Mapping[str, Floats], lengths: Sequence[int], sample_ids: Sequence[str]) -> Tensor:
    rows = [
        torch.from_numpy(column[i]) if i in column else torch.zeros(length)
        for i, length in zip(sample_ids, lengths, strict=True)
    ]
    assert [len(row) for row in rows] == list(lengths)
    return torch.cat(rows) if rows else torch.zeros(0)
