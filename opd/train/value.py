"""The critic as its ranks run it: the body of a language model, and a head that gives each state one number, its value.

This head replaces the model's output head, so that a critic's weights, moments and shards are handled like those of any model.
It begins with zeros: the value of every state is 0 until the critic has learned.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from opd.errors import ModelError
from opd.losses.logits import upcast_for_loss
from opd.losses.value import value_loss
from opd.models.layouts import Packed, find_positions_before_trained
from opd.records.types import Rollout
from opd.train.batch import OLD_VALUE, RETURN, MicroBatch


class ValueHead(nn.Module):
    """Computes a number for each hidden state, in float32, or in float64 if the states are."""

    def __init__(self, width: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1, width, dtype=dtype))
        self.bias = nn.Parameter(torch.zeros(1, dtype=dtype))

    def forward(self, hidden_N_D: Tensor) -> Tensor:
        value_N_1: Tensor = nn.functional.linear(
            upcast_for_loss(hidden_N_D), upcast_for_loss(self.weight), upcast_for_loss(self.bias)
        )
        return value_N_1.squeeze(-1)


class Critic(nn.Module):
    """The body of `lm`, a transformers causal language model, with a `ValueHead` in place of its output head."""

    def __init__(self, lm: Any, *, clip: float | None = None, freeze_attention: bool = False) -> None:
        super().__init__()
        lm.set_output_embeddings(ValueHead(lm.config.get_text_config(decoder=True).hidden_size, lm.dtype))
        if freeze_attention:
            freeze_attention_layers(lm)
        self.lm = lm
        self._clip = clip

    def forward(self, batch: MicroBatch, weight_N: Tensor, columns: Mapping[str, Tensor]) -> Tensor:
        """Return the micro-batch's part of the global batch's loss. `columns`: `RETURN` and `OLD_VALUE`, the critic's value as the step began."""
        value_N = self.values(batch.packed, batch.predict_N)
        error_N = value_loss(value_N, columns[RETURN], columns[OLD_VALUE], self._clip)
        return (error_N * weight_N).sum()

    def values(self, packed: Packed, state_N: Tensor) -> Tensor:
        """Return [N] the value of each state; `state_N` are indices into the [B*T] positions of `packed`."""
        value_N: Tensor = self.lm.get_output_embeddings()(self.compute_hidden_states(packed)[state_N])
        return value_N

    def compute_hidden_states(self, packed: Packed) -> Tensor:
        """Return [B*T, D] the last hidden states after the final norm."""
        states_B_T_D: Tensor = self.lm.base_model(**packed.inputs(self.lm.dtype)).last_hidden_state
        return states_B_T_D.flatten(0, 1)


def freeze_attention_layers(lm: Any) -> None:
    """Freeze the attention layers, so that only the other weights learn. Raises: ModelError if there are none."""
    layers = [module for module in lm.modules() if type(module).__name__.endswith("Attention")]
    if not layers:
        raise ModelError.at(
            "the critic's attention",
            found=f"no layer of {type(lm).__name__} is one",
            wanted="layers of attention that can be kept as they are",
            fix="train the critic whole",
        )
    for layer in layers:
        layer.requires_grad_(False)


def find_state_indices(packed: Packed, rollouts: Sequence[Rollout]) -> Tensor:
    """Return flat indices of the states before all trained tokens, then of the state behind the last token of each rollout."""
    lengths = [len(r.prompt_ids) + len(r.response_ids) for r in rollouts]
    ends_B = torch.tensor([packed.flat_index(i, length - 1) for i, length in enumerate(lengths)], dtype=torch.long)
    return torch.cat([find_positions_before_trained(packed, rollouts), ends_B])
