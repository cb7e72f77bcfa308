"""The student as the trainer runs it: the model's body, and a module that owns the output head and computes the loss.

Under ZeRO-3 a parameter is whole only inside the forward of the module that owns it. So the loss is a module that owns the head's
weight: the same Parameter object as the model's, also if it is tied to the embedding. DeepSpeed then gathers the weight around the
loss, and adds the gradients of both uses of a tied weight to one sum.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from types import MappingProxyType
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from opd.interfaces import Objective
from opd.losses.chunked import Loss, LossHead, Tokens, TokenStats
from opd.models.heads import Head, logit_rule
from opd.models.layouts import Packed
from opd.train.batch import ADVANTAGE, DIVERGENCE, POLICY, MicroBatch
from opd.train.companions import StudentView


class IndexerTerm(Protocol):
    """A module that adds the loss of the student's sparse indexers to its objective; see `opd.indexers.student`."""

    def watch_attention(self, lm: Any) -> AbstractContextManager[Any]:
        """Give a log of what attention reads; within, the body is called with the keyword `inputs`, which is the log."""
        ...

    def add_loss(self, loss: Tensor, log: Any, batch: MicroBatch, weight_N: Tensor) -> Tensor:
        """Return a scalar loss with the term added. `weight_N`: weights of the trained tokens in the objective."""
        ...

    def take_sum(self) -> float:
        """Return the sum of the term, without its factor, since the last call."""
        ...


class IndexerTermSpec(Protocol):
    """Settings of an `IndexerTerm`; plain values, because they cross process boundaries."""

    def build(self, lm: Any) -> Any:
        """Return the module, for a loaded model."""
        ...


class Student(nn.Module):
    """A transformers causal language model `lm`. Only its body is called; `loss_head` multiplies with its output head, and returns a loss or
    log-probs, by the type of its second argument. Both are its `forward`, around which DeepSpeed gathers the head."""

    def __init__(
        self,
        lm: Any,
        objective: Objective,
        own_objectives: Mapping[str, Objective] = MappingProxyType({}),
        indexers: IndexerTermSpec | None = None,
        **options: Any,
    ) -> None:
        """Wrap a model. `own_objectives`: domain -> objective, for domains that have another one; without `indexers` its sparse indexers
        learn nothing; `options` are the other fields of `opd.losses.chunked.Loss`."""
        super().__init__()
        self.lm = lm
        loss = Loss(objective=objective, rule=logit_rule(lm.config), **options)
        own_losses = {domain: replace(loss, objective=own) for domain, own in own_objectives.items()}
        self.loss_head = LossHead(lm.get_output_embeddings().weight, loss, own_losses)
        self.indexers: Any = indexers.build(lm) if indexers else None
        """An `IndexerTerm`, or None."""

    def forward(
        self,
        batch: MicroBatch,
        heads: Mapping[str, Head],
        weights: Mapping[str, Tensor],
        columns: Mapping[str, Tensor] = MappingProxyType({}),
        view: StudentView | None = None,
    ) -> tuple[Tensor, TokenStats]:
        """Return the micro-batch's part of the global batch's loss, a scalar, and numbers for each token.

        The loss is the sum of the components in `weights`: component -> [N] weights of the tokens; `DIVERGENCE` is always there, and
        its weights are those of the indexers' loss, too.
        `columns`: name -> [N] other numbers that components need, such as `ADVANTAGE` with `POLICY`. `heads`: content hash ->
        output head of a teacher. `view` shows companions the layers' outputs and the logits.
        """
        with view.watch_layers(self.lm) if view else nullcontext(), self._watch_indexers() as log:
            hidden_N_D = self.compute_hidden_states(batch.packed, log)[batch.predict_N]
        tokens = Tokens(
            token_N=batch.token_N,
            weight_N=weights[DIVERGENCE],
            behaviour_N=batch.behaviour_N,
            advantage_N=columns[ADVANTAGE] if POLICY in weights else None,
            policy_weight_N=weights.get(POLICY),
        )
        show_logits = view.show_logits if view else None
        loss, stats = self.loss_head(hidden_N_D, tokens, batch.blocks, heads, show_logits)
        if log is not None:
            loss = self.indexers.add_loss(loss, log, batch, weights[DIVERGENCE])
        return loss, stats

    def _watch_indexers(self) -> AbstractContextManager[Any]:
        if self.indexers is None or not torch.is_grad_enabled():
            return nullcontext()
        watching: AbstractContextManager[Any] = self.indexers.watch_attention(self.lm)
        return watching

    def compute_hidden_states(self, packed: Packed, log: Any = None) -> Tensor:
        """Return [B*T, D] the last hidden states after the final norm. `log` gets what the layers' attention reads."""
        noted = {} if log is None else {"inputs": log}
        return self.lm.base_model(**packed.inputs(self.lm.dtype), **noted).last_hidden_state.flatten(0, 1)

    def compute_logprobs(self, packed: Packed, predict_N: Tensor, token_N: Tensor) -> Tensor:
        """Return [N] the log-prob of each token, from the hidden state at the position that predicts it."""
        logprob_N: Tensor = self.loss_head(self.compute_hidden_states(packed)[predict_N], token_N)
        return logprob_N

    def compute_top_logprobs(self, packed: Packed, predict_N: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """Return [N, K] the `k` likeliest tokens after each of these positions, and [N, K] their log-probs."""
        top: tuple[Tensor, Tensor] = self.loss_head(self.compute_hidden_states(packed)[predict_N], k)
        return top
