"""The student's sparse indexers, which learn in its own steps: each the mean attention of the layers that it serves.

    one forward pass of the body ─▶ what each indexer read, and queries and keys of every layer
    after the objective ─▶ loss += loss_weight * mean over the indexers of sum over positions of weight * KL(mean attention || scores)

What indexers and attention read is detached, and the choice of an indexer has no gradient. So this term gives gradients to indexers alone,
and every other gradient stays as it is, bit for bit. Shapes: as in `opd.indexers.attention`; N trained tokens.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from opd.indexers.attention import AttentionInputs, register_indexed_attention
from opd.indexers.distillation import ServedLayers, distil_indexer
from opd.indexers.patterns import list_groups, read_pattern
from opd.indexers.scores import IndexerInputs, widen_type
from opd.train.batch import MicroBatch

CHUNK = 128
"""Queries whose attention is in memory together."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LearningIndexersSpec:
    """Settings with which a student's indexers learn."""

    loss_weight: float
    """Factor of their term in the loss."""

    def build(self, lm: Any) -> LearningIndexers:
        """Return the module for a loaded model, which computes with our attention from now on."""
        return LearningIndexers(lm, self.loss_weight)


class LearningIndexers(nn.Module):
    """All indexers of a student, and their term of its loss. Implements `opd.train.student.IndexerTerm`."""

    def __init__(self, lm: Any, loss_weight: float) -> None:
        super().__init__()
        lm.set_attn_implementation(register_indexed_attention())
        self._groups = list_groups(read_pattern(lm.config))
        self._weight = loss_weight
        self._sum = 0.0
        self.losses = nn.ModuleList(
            IndexerLoss(lm.model.layers[group[0]].self_attn.indexer, lm.config.index_topk) for group in self._groups
        )

    @contextmanager
    def watch_attention(self, lm: Any) -> Iterator[AttentionLog]:
        """Within, a forward pass with the keyword `inputs` as given notes what indexers and layers read. What is recomputed for the
        backward pass comes later, and is not noted."""
        log = AttentionLog()
        with ExitStack() as stack:
            for group in self._groups:
                indexer = lm.model.layers[group[0]].self_attn.indexer
                stack.enter_context(indexer.register_forward_pre_hook(partial(log.note_indexer, group[0])))
            yield log
            log.closed = True

    def add_loss(self, loss: Tensor, log: AttentionLog, batch: MicroBatch, weight_N: Tensor) -> Tensor:
        """Return a scalar loss with the term added.

        `weight_N`: weights of the trained tokens in the objective. A row's positions share its weight, so the term is a mean over all
        positions of the step in which each row counts as much as in the objective.
        """
        weight_B_T = spread_weights(batch, weight_N)
        for group, indexer_loss in zip(self._groups, self.losses, strict=True):
            readable_B_T_S, inputs = log.indexers[group[0]]
            served = ServedLayers(
                layer=group[0],
                indexer=inputs,
                attentions=[log.attentions[index] for index in group],
                readable_B_T_S=readable_B_T_S,
                weight_B_T=weight_B_T,
            )
            loss, value = indexer_loss(loss, served, self._weight / len(self._groups))
            self._sum += value / len(self._groups)
        return loss

    def take_sum(self) -> float:
        """Return the sum of the term, without its factor, since the last call."""
        taken, self._sum = self._sum, 0.0
        return taken


class AttentionLog:
    """Inputs of the indexers and the attention of all layers in one forward pass, detached."""

    def __init__(self) -> None:
        self.indexers: dict[int, tuple[Tensor, IndexerInputs]] = {}
        """Layer -> mask [B, T, S], true where a token may be read, and the inputs of its indexer."""
        self.attentions: list[AttentionInputs] = []
        self.closed = False

    def append(self, inputs: AttentionInputs) -> None:
        """Note the next layer's queries and keys."""
        if not self.closed:
            self.attentions.append(
                AttentionInputs(
                    query_B_H_T_E=inputs.query_B_H_T_E.detach(),
                    key_B_H_S_E=inputs.key_B_H_S_E.detach(),
                    scaling=inputs.scaling,
                )
            )

    def note_indexer(self, layer: int, indexer: Any, inputs: Sequence[Any]) -> None:
        """Note what an indexer reads."""
        hidden_B_T_D, compressed_B_T_Q, (cos, sin), readable_B_T_S = inputs[:4]
        assert readable_B_T_S.dtype == torch.bool, "sdpa_mask makes it"
        self.indexers[layer] = (
            readable_B_T_S,
            IndexerInputs(
                indexer=indexer,
                hidden_B_T_D=hidden_B_T_D.detach(),
                compressed_B_T_Q=compressed_B_T_Q.detach(),
                rotation=(cos, sin),
            ),
        )


def spread_weights(batch: MicroBatch, weight_N: Tensor) -> Tensor:
    """Return [B, T] the weight of each position: that of a row's trained tokens, in equal parts on its tokens but the first, which has
    nothing to choose."""
    ids_B_T = batch.packed.input_ids_B_T
    assert not batch.packed.paths, "layers with a choice are not laid out as trees"
    weight = weight_N.new_zeros(ids_B_T.numel())
    parts = weight_N.split(list(batch.trained_lengths))
    for index, (length, weights) in enumerate(zip(batch.lengths, parts, strict=True)):
        offset = batch.packed.offsets[index]
        if length > 1:
            weight[offset + 1 : offset + length] = weights.sum() / (length - 1)
    return weight.view_as(ids_B_T)


class IndexerLoss(nn.Module):
    """The loss of one indexer. It owns the indexer's weights, the same Parameter objects as the model's, so that DeepSpeed gathers them
    around it (see `opd.train.student`)."""

    def __init__(self, indexer: Any, topk: int) -> None:
        super().__init__()
        self._topk = topk
        for name, param in indexer.named_parameters():
            self.register_parameter(name.replace(".", "_"), param)
        # In a list, it is no module of this one: DeepSpeed must not take its weights for the student's.
        self._copies = [copy.deepcopy(indexer, {id(p): nn.Parameter(torch.empty(0)) for p in indexer.parameters()})]

    def forward(self, loss: Tensor, served: ServedLayers, factor: float) -> tuple[Tensor, float]:
        """Return the loss with `factor` times the indexer's own added, and the indexer's own: the weighted sum of its KLs, nats."""
        params, (indexer,) = list(self.parameters()), self._copies
        for own, param in zip(indexer.parameters(), params, strict=True):
            own.data, own.grad = widen_type(param.detach()), None
        inputs = IndexerInputs(
            indexer=indexer,
            hidden_B_T_D=served.indexer.hidden_B_T_D,
            compressed_B_T_Q=served.indexer.compressed_B_T_Q,
            rotation=served.indexer.rotation,
        )
        sums = distil_indexer(replace(served, indexer=inputs), self._topk, dense=False, chunk=CHUNK, divisor=1.0)
        gradients = []
        for own, param in zip(indexer.parameters(), params, strict=True):
            assert own.grad is not None
            gradients.append((own.grad * factor).to(param.dtype))
            own.data, own.grad = torch.empty(0), None
        return _AddLoss.apply(loss, factor * sums.loss, gradients, *params), sums.loss


class _AddLoss(torch.autograd.Function):
    """Adds a value to a loss; the value's gradients are computed already."""

    @staticmethod
    def forward(ctx: Any, loss: Tensor, value: float, gradients: list[Tensor], *params: Tensor) -> Tensor:
        ctx.gradients = gradients
        return loss + value

    @staticmethod
    def backward(ctx: Any, grad_loss: Tensor) -> tuple[Any, ...]:
        assert ctx.gradients is not None, "the loss was differentiated a second time"
        gradients, ctx.gradients = ctx.gradients, None
        return grad_loss, None, None, *(gradient.mul_(grad_loss.to(gradient.dtype)) for gradient in gradients)
