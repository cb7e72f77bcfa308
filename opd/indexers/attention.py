"""An attention implementation for transformers that can hand out queries and keys, or attend to all tokens whatever the indexer chose.

Shapes here and in this package: B rows, T tokens, S tokens that may be attended to, C queries of a chunk, H heads, E width of a head,
K tokens that an indexer chooses, D hidden width, Q width of the compressed queries.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

NAME = "opd_indexed"
"""Name of the implementation in transformers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionInputs:
    """The inputs of one layer's attention weights."""

    query_B_H_T_E: Tensor
    key_B_H_S_E: Tensor
    scaling: float


class InputsList(Protocol):
    """Whatever takes the inputs of one layer after the other, such as a list."""

    def append(self, inputs: AttentionInputs, /) -> object:
        """Take the next layer's."""
        ...


def register_indexed_attention() -> str:
    """Make transformers know the implementation. Returns its name."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import sdpa_mask

    AttentionInterface.register(NAME, _attend_to_chosen)
    AttentionMaskInterface.register(NAME, sdpa_mask)
    return NAME


def _attend_to_chosen(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor,
    *,
    indices: Tensor,
    scaling: float,
    dropout: float = 0.0,
    inputs: InputsList | None = None,
    attend_to_all: bool = False,
    **_: Any,
) -> tuple[Tensor, None]:
    """Return [B, T, H, E] what the tokens read. `attention_mask` is true [B, 1, T, S] where a token may be read, `indices` are [B, T, K].

    `inputs` and `attend_to_all` are keywords that a caller gives to a layer, which hands them on: a list to which this layer's inputs are
    added, and that the choice of the indexer does not count.
    """
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    if inputs is not None:
        inputs.append(AttentionInputs(query_B_H_T_E=query, key_B_H_S_E=key, scaling=scaling))
    mask = attention_mask if attend_to_all else attention_mask & mark_chosen(indices, key.shape[2])[:, None]
    result: tuple[Tensor, None] = sdpa_attention_forward(
        module, query, key, value, mask, dropout=dropout, scaling=scaling
    )
    return result


def mark_chosen(indices_B_T_K: Tensor, num_keys: int) -> Tensor:
    """Return a mask [B, T, S], true at the chosen tokens."""
    shape = (*indices_B_T_K.shape[:2], num_keys)
    return torch.zeros(shape, dtype=torch.bool, device=indices_B_T_K.device).scatter(-1, indices_B_T_K.long(), True)
