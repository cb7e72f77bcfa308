"""The scores by which an indexer chooses tokens, with gradients: transformers computes them without, and keeps only the places of the
largest.

    score of token s for query t = sum over heads h of weight_{t,h} * relu(q_{t,h} · k_s) / sqrt(heads * width)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor

from opd.indexers.layers import LayerRunner, LayerState


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexerInputs:
    """The inputs of a layer's indexer, detached from the model."""

    indexer: Any
    hidden_B_T_D: Tensor
    compressed_B_T_Q: Tensor
    """Queries of the layer before they are widened to heads."""
    rotation: tuple[Tensor, Tensor]

    @classmethod
    @torch.no_grad()
    def of_layer(cls, runner: LayerRunner, index: int, state: LayerState, indexer: Any = None) -> Self:
        """Return the inputs from the input of the layer. `indexer`: the indexer that learns; None: the layer's own."""
        attention, hidden_B_T_D = runner.attention(index), runner.norm_inputs(index, state)
        return cls(
            indexer=attention.indexer if indexer is None else indexer,
            hidden_B_T_D=hidden_B_T_D,
            compressed_B_T_Q=attention.q_a_layernorm(attention.q_a_proj(hidden_B_T_D)),
            rotation=state.rotation,
        )

    def compute_keys(self) -> Tensor:
        """Return the indexer's keys [B, S, E]."""
        keys_B_S_E = self.indexer.k_norm(_project_states(self.indexer.wk, self.hidden_B_T_D))
        return self._rotate_heads(keys_B_S_E[:, :, None], slice(None))[:, :, 0]

    def compute_scores(self, keys_B_S_E: Tensor, chunk: slice) -> Tensor:
        """Return the scores [B, C, S] of all tokens for the queries of a chunk, in float32 at least; causality is not in them."""
        indexer = self.indexer
        heads, width = indexer.n_heads, indexer.head_dim
        query_B_C_H_E = _project_states(indexer.wq_b, self.compressed_B_T_Q[:, chunk]).unflatten(-1, (heads, width))
        query_B_C_H_E = widen_type(self._rotate_heads(query_B_C_H_E, chunk))
        products_B_C_H_S = torch.relu(query_B_C_H_E @ widen_type(keys_B_S_E).transpose(1, 2)[:, None] * width**-0.5)
        weight_B_C_H = widen_type(_project_states(indexer.weights_proj, self.hidden_B_T_D[:, chunk])) * heads**-0.5
        return (weight_B_C_H[:, :, None] @ products_B_C_H_S)[:, :, 0]

    def _rotate_heads(self, states_B_T_H_E: Tensor, chunk: slice) -> Tensor:
        """Return queries or keys with the rotary embedding on their first part."""
        from transformers.models.glm_moe_dsa.modeling_glm_moe_dsa import apply_rotary_pos_emb_interleave

        rotated = self.indexer.qk_rope_head_dim
        cos, sin = (part[:, chunk] for part in self.rotation)
        turned, _ = apply_rotary_pos_emb_interleave(
            states_B_T_H_E[..., :rotated], states_B_T_H_E[:, :, :1, :rotated], cos, sin, unsqueeze_dim=2
        )
        return torch.cat([turned, states_B_T_H_E[..., rotated:]], dim=-1)


def _project_states(linear: Any, states: Tensor) -> Tensor:
    """Return the projection of states, in the type of the weights: an indexer may be wider than the model around it."""
    projected: Tensor = linear(states.to(linear.weight.dtype))
    return projected


def widen_type(tensor: Tensor) -> Tensor:
    """Return the tensor in float32, or as it is if it is wider."""
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))
