"""The indexer of a draft's layer, for students whose layers have one: it chooses the positions that all guesses after a start read.

Published configs call it `index_share_for_mtp_iteration`: the first guess chooses, and later guesses take its choice. The indexer learns, over
all positions, the mean attention of the guesses that it serves; nothing else of the draft gets a gradient of that.

Shapes: as in `opd.draft.head`; J width of what attention reads.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers.models.glm_moe_dsa.modeling_glm_moe_dsa import GlmMoeDsaIndexer

from opd.draft.shape import IndexerShape
from opd.indexers.distillation import compute_kl, mark_largest
from opd.indexers.scores import IndexerInputs

if TYPE_CHECKING:
    from opd.draft.head import Windows


def build_indexer(shape: IndexerShape, width: int, rotated: int) -> nn.Module:
    """Return an indexer with the names of published weights. `width`: J; `rotated`: numbers of a head that positions turn."""
    return GlmMoeDsaIndexer(
        SimpleNamespace(
            hidden_size=width,
            q_lora_rank=width,
            index_n_heads=shape.heads,
            index_head_dim=shape.head_dim,
            index_topk=shape.topk,
            qk_rope_head_dim=rotated,
        ),
        layer_idx=0,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """The positions that the guesses after each start read."""

    scores_I_W_L: Tensor
    """The indexer's scores, minus infinity behind the start; with gradients by the indexer alone."""
    chosen_I_W_L: Tensor

    def compute_loss(self, attention_I_W_L: Tensor) -> Tensor:
        """Return [I, W] KL(attention || softmax(scores)), nats. `attention_I_W_L`: mean attention of the guesses, to all positions."""
        return compute_kl(attention_I_W_L, self.scores_I_W_L.log_softmax(-1))


def choose_positions(
    indexer: Any, joined_S_L_J: Tensor, rotation: tuple[Tensor, Tensor], windows: Windows, seen_I_W_L: Tensor
) -> Choice:
    """Return the choice of the first guess after each start. `joined_S_L_J`: what attention reads of the first guess after each position."""
    joined_S_L_J = joined_S_L_J.detach()
    sequences = _read_inputs(indexer, joined_S_L_J, rotation)
    places = (windows.sequence_I[:, None], windows.start_I_W)
    cos, sin = (part[places] for part in rotation)
    starts = _read_inputs(indexer, joined_S_L_J[places], (cos, sin))
    scores_I_W_L = starts.compute_scores(sequences.compute_keys()[windows.sequence_I], slice(None))
    scores_I_W_L = scores_I_W_L.masked_fill(~seen_I_W_L, -torch.inf)
    chosen_I_W_L = mark_largest(scores_I_W_L.detach(), indexer.index_topk) & seen_I_W_L
    return Choice(scores_I_W_L=scores_I_W_L, chosen_I_W_L=chosen_I_W_L)


def _read_inputs(indexer: Any, joined_B_T_J: Tensor, rotation: tuple[Tensor, Tensor]) -> IndexerInputs:
    # The layer does not compress its queries.
    return IndexerInputs(indexer=indexer, hidden_B_T_D=joined_B_T_J, compressed_B_T_Q=joined_B_T_J, rotation=rotation)
