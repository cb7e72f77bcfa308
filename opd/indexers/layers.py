"""A model's layers, run one at a time under any pattern of shared indexers, whatever pattern its config has."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from opd.indexers.attention import AttentionInputs, register_indexed_attention
from opd.indexers.patterns import FULL, SHARED, read_pattern

LOSS_TOKENS = 1024
"""Tokens whose logits are in memory together."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TextRow:
    """One sequence of a calibration stream."""

    token_ids: tuple[int, ...]
    num_prompt: int
    """Tokens at the beginning on which there is no loss; at least 1."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TextBatch:
    """Sequences side by side, padded on the right: a causal model reads nothing to the right of a token."""

    ids_B_T: Tensor
    counted_B_T: Tensor
    """True at tokens whose prediction is counted."""
    lengths_B: Tensor

    @classmethod
    def of_rows(cls, rows: Sequence[TextRow], device: torch.device) -> TextBatch:
        """Make a batch."""
        ids = torch.zeros(len(rows), max(len(row.token_ids) for row in rows), dtype=torch.long)
        counted = torch.zeros_like(ids, dtype=torch.bool)
        for i, row in enumerate(rows):
            ids[i, : len(row.token_ids)] = torch.tensor(row.token_ids)
            counted[i, row.num_prompt : len(row.token_ids)] = True
        lengths = torch.tensor([len(row.token_ids) for row in rows])
        return cls(ids_B_T=ids.to(device), counted_B_T=counted.to(device), lengths_B=lengths.to(device))


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerState:
    """The inputs of a layer."""

    hidden_B_T_D: Tensor
    chosen_B_T_K: Tensor | None
    """The tokens that the layer before attended to; None before the first layer."""
    mask_B_1_T_T: Tensor
    positions_1_T: Tensor
    rotation: tuple[Tensor, Tensor]
    """Cosine and sine of the rotary embedding."""


class LayerRunner:
    """Runs the layers of a loaded `glm_moe_dsa` model. The model computes with our attention from now on."""

    def __init__(self, lm: Any) -> None:
        lm.set_attn_implementation(register_indexed_attention())
        self._lm = lm.eval()
        self.pattern = read_pattern(lm.config)
        """The model's own pattern: a layer that is shared here has no indexer."""

    @property
    def num_layers(self) -> int:
        return len(self.pattern)

    @property
    def topk(self) -> int:
        """Number of tokens that an indexer chooses."""
        topk: int = self._lm.config.index_topk
        return topk

    @property
    def device(self) -> torch.device:
        device: torch.device = self._lm.device
        return device

    def attention(self, index: int) -> Any:
        """Return the attention module of a layer, which has the indexer."""
        return self._lm.model.layers[index].self_attn

    def norm_inputs(self, index: int, state: LayerState) -> Tensor:
        """Return [B, T, D] what the attention of a layer, and its indexer, read."""
        normed: Tensor = self._lm.model.layers[index].input_layernorm(state.hidden_B_T_D)
        return normed

    def embed(self, ids_B_T: Tensor) -> LayerState:
        """Return the input of the first layer."""
        body, length = self._lm.model, ids_B_T.shape[1]
        hidden_B_T_D = body.embed_tokens(ids_B_T)
        positions_1_T = torch.arange(length, device=ids_B_T.device)[None]
        causal_T_T = torch.ones(length, length, dtype=torch.bool, device=ids_B_T.device).tril()
        return LayerState(
            hidden_B_T_D=hidden_B_T_D,
            chosen_B_T_K=None,
            mask_B_1_T_T=causal_T_T.expand(len(ids_B_T), 1, length, length),
            positions_1_T=positions_1_T,
            rotation=body.rotary_emb(hidden_B_T_D, position_ids=positions_1_T),
        )

    def run_layer(
        self,
        index: int,
        state: LayerState,
        letter: str,
        *,
        inputs: list[AttentionInputs] | None = None,
        attend_to_all: bool = False,
    ) -> LayerState:
        """Return the input of the next layer. `letter`: whether this one is full or shared.

        `inputs`, `attend_to_all`: see `opd.indexers.attention`.
        """
        with _share_indexer(self.attention(index), letter):
            hidden, chosen = self._lm.model.layers[index](
                state.hidden_B_T_D,
                attention_mask=state.mask_B_1_T_T,
                position_ids=state.positions_1_T,
                position_embeddings=state.rotation,
                prev_topk_indices=state.chosen_B_T_K,
                inputs=inputs,
                attend_to_all=attend_to_all,
            )
        return replace(state, hidden_B_T_D=hidden, chosen_B_T_K=chosen)

    def run_layers(self, start: int, state: LayerState, pattern: str) -> LayerState:
        """Return the state behind the last layer, from the input of layer `start`."""
        for index in range(start, self.num_layers):
            state = self.run_layer(index, state, pattern[index])
        return state

    def compute_logits(self, state: LayerState) -> Tensor:
        """Return [B, T, V] from the state behind the last layer."""
        logits: Tensor = self._lm.lm_head(self._lm.model.norm(state.hidden_B_T_D))
        return logits

    def sum_loss(self, state: LayerState, batch: TextBatch) -> float:
        """Return the sum of the negative log-probs of a batch's counted tokens, in nats, from the state behind the last layer."""
        predicts = batch.counted_B_T[:, 1:]  # log-prob of token t lies at t-1
        hidden_N_D = self._lm.model.norm(state.hidden_B_T_D)[:, :-1][predicts]
        total = 0.0
        for hidden_C_D, target_C in zip(
            hidden_N_D.split(LOSS_TOKENS), batch.ids_B_T[:, 1:][predicts].split(LOSS_TOKENS), strict=True
        ):
            logits_C_V = self._lm.lm_head(hidden_C_D).float()
            total += float(torch.nn.functional.cross_entropy(logits_C_V, target_C, reduction="sum").double())
        return total


@contextmanager
def _share_indexer(attention: Any, letter: str) -> Any:
    """Within, a layer takes the choice of the layer before it if `letter` says so."""
    indexer = attention.indexer
    assert letter == SHARED or (letter == FULL and indexer is not None), "check_pattern has refused it"
    attention.indexer = indexer if letter == FULL else None
    try:
        yield
    finally:
        attention.indexer = indexer
