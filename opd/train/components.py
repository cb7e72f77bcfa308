"""Components of a step's loss. The driver decides on the weights of their tokens; a rank only turns these into tensors, and does
not know by which method they were computed."""

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
    """A weighted sum over tokens that is one addend of the loss, over the samples of all ranks or of one."""

    weights: Mapping[str, float]
    """Sample id -> weight of each of its trained tokens, chosen so that the sum over all ranks is a mean. A sample that is missing
    here takes no part in the component."""
    factor: float = 1.0
    """Factor of that mean in the loss."""
    columns: Mapping[str, Mapping[str, Floats]] = field(default_factory=dict)
    """Name -> sample id -> [N] a number for each trained token, such as its advantage."""

    def select_samples(self, sample_ids: Sequence[str]) -> Component:
        """Return the component with the entries of these samples alone."""
        ids = [i for i in sample_ids if i in self.weights]
        columns = {name: {i: column[i] for i in ids} for name, column in self.columns.items()}
        return replace(self, weights={i: self.weights[i] for i in ids}, columns=columns)

    def token_weights(self, batch: MicroBatch, sample_ids: Sequence[str]) -> Tensor:
        """Return [N] the weight of each token of a micro-batch that has these samples, without the factor."""
        return token_weights(batch, [self.weights.get(i, 0.0) for i in sample_ids])

    def token_columns(self, batch: MicroBatch, sample_ids: Sequence[str]) -> dict[str, Tensor]:
        """Return name -> [N] that column for a micro-batch that has these samples; 0 for samples that take no part."""
        return {name: _join_rows(column, batch, sample_ids) for name, column in self.columns.items()}


def _join_rows(column: Mapping[str, Floats], batch: MicroBatch, sample_ids: Sequence[str]) -> Tensor:
    """Join the samples' numbers in order; a sample that the column lacks gets as many zeros as it has trained tokens."""
    rows = [
        torch.from_numpy(column[i][first : first + length]) if i in column else torch.zeros(length)
        for i, first, length in zip(sample_ids, batch.earlier_tokens, batch.trained_lengths, strict=True)
    ]
    assert [len(row) for row in rows] == list(batch.trained_lengths)
    return torch.cat(rows) if rows else torch.zeros(0)


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateWork:
    """One rank's part of one update of a model that judges rows."""

    step: int
    lr: float
    component: Component
    """Weights of the tokens, and for a critic two columns: the returns of the states before the tokens, and its values of these states
    when the step began."""
