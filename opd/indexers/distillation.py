"""Distil an indexer to the attention of all layers that it serves.

The target of a query is p, the mean over these layers and their heads of the attention weights. The loss is KL(p || softmax(scores)),
whose gradient is that of the mean over the layers of each layer's own KL (IndexCache, arXiv 2603.12201, proposition 1): the layers
differ only in the entropy of their weights, which no indexer can change.

In the dense stage all tokens count and the model attends to all. In the sparse stage it attends to the indexer's choice, and weights and
scores are normalised within that. Queries come in chunks: [queries of a chunk, tokens] of one layer is the most that is in memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from opd.indexers.attention import AttentionInputs
from opd.indexers.layers import LayerRunner, TextBatch
from opd.indexers.patterns import list_groups
from opd.indexers.scores import IndexerInputs, widen_type


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedLayers:
    """One indexer with the attention of the layers that it serves, for one batch."""

    layer: int
    """The layer that has the indexer."""
    indexer: IndexerInputs
    attentions: Sequence[AttentionInputs]
    readable_B_T_S: Tensor
    """True where a token may be read."""
    weight_B_T: Tensor
    """Weight of each query's KL in the loss; a query with 0 is not counted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DistillationSums:
    """Measurements of an indexer on a batch, as sums over queries."""

    loss: float
    """Weighted sum of the KLs, nats."""
    chosen_mass: float
    """Sum of the attention that the chosen tokens have, between 0 and 1 for each query with a choice."""
    num_queries: int
    num_choosing: int
    """Queries with more tokens to read than are chosen."""

    def __add__(self, other: DistillationSums) -> DistillationSums:
        return DistillationSums(
            loss=self.loss + other.loss,
            chosen_mass=self.chosen_mass + other.chosen_mass,
            num_queries=self.num_queries + other.num_queries,
            num_choosing=self.num_choosing + other.num_choosing,
        )


@torch.no_grad()
def run_groups(
    runner: LayerRunner, batch: TextBatch, pattern: str, *, dense: bool, indexers: Mapping[int, Any] | None = None
) -> Iterator[ServedLayers]:
    """Run the model under a pattern, and yield each indexer with the layers that it serves as soon as these are through. `indexers`:
    layer -> the indexer that learns; by default the layers' own. The first token has nothing to choose, and is not counted."""
    state = runner.embed(batch.ids_B_T)
    place_T = torch.arange(batch.ids_B_T.shape[1], device=batch.ids_B_T.device)
    weight_B_T = ((place_T > 0) & (place_T < batch.lengths_B[:, None])).to(state.hidden_B_T_D.dtype)
    for group in list_groups(pattern):
        indexer = IndexerInputs.of_layer(runner, group[0], state, (indexers or {}).get(group[0]))
        attentions: list[AttentionInputs] = []
        for index in group:
            state = runner.run_layer(index, state, pattern[index], inputs=attentions, attend_to_all=dense)
        yield ServedLayers(
            layer=group[0],
            indexer=indexer,
            attentions=attentions,
            readable_B_T_S=state.mask_B_1_T_T[:, 0],
            weight_B_T=weight_B_T,
        )


def distil_indexer(
    served: ServedLayers, topk: int, *, dense: bool, chunk: int, divisor: float | None = None
) -> DistillationSums:
    """Return the sums of a batch. With `divisor` the gradients of the loss, divided by it, are added to the indexer's parameters."""
    length = served.indexer.hidden_B_T_D.shape[1]
    train, sums = divisor is not None, DistillationSums(loss=0.0, chosen_mass=0.0, num_queries=0, num_choosing=0)
    for start in range(0, length, chunk):
        with torch.set_grad_enabled(train):
            # The keys are computed anew for each chunk, because its backward pass frees what they were computed from.
            keys_B_S_E = served.indexer.compute_keys()
            loss, chunk_sums = _distil_chunk(served, keys_B_S_E, slice(start, min(start + chunk, length)), topk, dense)
            if divisor is not None:
                (loss / divisor).backward()
        sums += chunk_sums
    return sums


def _distil_chunk(
    served: ServedLayers, keys_B_S_E: Tensor, chunk: slice, topk: int, dense: bool
) -> tuple[Tensor, DistillationSums]:
    """Return the weighted sum of the KLs of a chunk's queries, and the sums."""
    readable_B_C_S, weight_B_C = served.readable_B_T_S[:, chunk], served.weight_B_T[:, chunk]
    scores_B_C_S = served.indexer.compute_scores(keys_B_S_E, chunk).masked_fill(~readable_B_C_S, -torch.inf)
    chosen_B_C_S = mark_largest(scores_B_C_S.detach(), topk) & readable_B_C_S
    counted_B_C_S = readable_B_C_S if dense else chosen_B_C_S
    target_B_C_S = _mean_attention(served.attentions, chunk, counted_B_C_S)
    kl_B_C = compute_kl(target_B_C_S, scores_B_C_S.masked_fill(~counted_B_C_S, -torch.inf).log_softmax(-1))
    is_query_B_C = weight_B_C > 0
    choosing_B_C = is_query_B_C & (readable_B_C_S.sum(-1) > topk)
    loss = (kl_B_C * weight_B_C.to(kl_B_C.dtype))[is_query_B_C].sum()
    return loss, DistillationSums(
        loss=float(loss.detach()),
        chosen_mass=float((target_B_C_S * chosen_B_C_S).sum(-1)[choosing_B_C].sum()),
        num_queries=int(is_query_B_C.sum()),
        num_choosing=int(choosing_B_C.sum()),
    )


def mark_largest(scores_B_C_S: Tensor, topk: int) -> Tensor:
    """Return a mask, true at the `topk` largest of each row, or at all if there are no more."""
    places_B_C_K = scores_B_C_S.topk(min(topk, scores_B_C_S.shape[-1]), dim=-1).indices
    return torch.zeros_like(scores_B_C_S, dtype=torch.bool).scatter(-1, places_B_C_K, True)


@torch.no_grad()
def _mean_attention(attentions: Sequence[AttentionInputs], chunk: slice, counted_B_C_S: Tensor) -> Tensor:
    """Return [B, C, S]: the mean over layers and heads of the attention weights, each normalised within the tokens that count."""
    total: Tensor | float = 0.0
    for attention in attentions:
        query_B_H_C_E = attention.query_B_H_T_E[:, :, chunk]
        products_B_H_C_S = widen_type(query_B_H_C_E @ attention.key_B_H_S_E.transpose(2, 3)) * attention.scaling
        total = total + products_B_H_C_S.masked_fill(~counted_B_C_S[:, None], -torch.inf).softmax(-1).mean(1)
    assert isinstance(total, Tensor)
    return total / len(attentions)


def compute_kl(target_B_C_S: Tensor, logq_B_C_S: Tensor) -> Tensor:
    """Return KL(target || q) [B, C] in nats. Tokens that do not count have target 0 and q 0, and add nothing."""
    counted = target_B_C_S > 0
    ratio = target_B_C_S.clamp_min(torch.finfo(target_B_C_S.dtype).tiny).log() - logq_B_C_S.masked_fill(~counted, 0.0)
    return (target_B_C_S * ratio).sum(-1)
