"""The student as the trainer runs it: the model's body, and a module that owns the output head and computes the loss.

Under ZeRO-3 a parameter is whole only inside the forward of the module that owns it. So the loss is a module that owns the head's
weight: the same Parameter object as the model's, also if it is tied to the embedding. DeepSpeed then gathers the weight around the
loss, and adds the gradients of both uses of a tied weight to one sum.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from torch import Tensor, nn

from opd.interfaces import Objective
from opd.losses.chunked import Loss, LossHead, Tokens, TokenStats
from opd.models.heads import Head, logit_rule
from opd.models.layouts import Packed
from opd.train.batch import ADVANTAGE, DIVERGENCE, POLICY, MicroBatch
from opd.train.companions import StudentView


class Student(nn.Module):
    """A transformers causal language model `lm`. Only its body is called; `loss_head` multiplies with its output head, and returns a loss or
    log-probs, by the type of its second argument. Both are its `forward`, around which DeepSpeed gathers the head."""

    def __init__(
        self,
        lm: Any,
        objective: Objective,
        own_objectives: Mapping[str, Objective] = MappingProxyType({}),
        **options: Any,
    ) -> None:
        """Wrap a model. `own_objectives`: domain -> objective, for domains that have another one; `options` are the other fields of
        `opd.losses.chunked.Loss`."""
        super().__init__()
        self.lm = lm
        loss = Loss(objective=objective, rule=logit_rule(lm.config), **options)
        own_losses = {domain: replace(loss, objective=own) for domain, own in own_objectives.items()}
        self.loss_head = LossHead(lm.get_output_embeddings().weight, loss, own_losses)

    def forward(
        self,
        batch: MicroBatch,
        heads: Mapping[str, Head],
        weights: Mapping[str, Tensor],
        columns: Mapping[str, Tensor] = MappingProxyType({}),
        view: StudentView | None = None,
    ) -> tuple[Tensor, TokenStats]:
        """Return the micro-batch's part of the global batch's loss, a scalar, and numbers for each token.

        The loss is the sum of the components in `weights`: component -> [N] weights of the tokens; `DIVERGENCE` is always there.
        `columns`: name -> [N] other numbers that components need, such as `ADVANTAGE` with `POLICY`. `heads`: content hash ->
        output head of a teacher. `view` shows companions the layers' outputs and the logits.
        """
        with view.watch_layers(self.lm) if view else nullcontext():
            hidden_N_D = self.compute_hidden_states(batch.packed)[batch.predict_N]
        tokens = Tokens(
            token_N=batch.token_N,
            weight_N=weights[DIVERGENCE],
            behaviour_N=batch.behaviour_N,
            advantage_N=columns[ADVANTAGE] if POLICY in weights else None,
            policy_weight_N=weights.get(POLICY),
        )
        show_logits = view.show_logits if view else None
        loss, stats = self.loss_head(hidden_N_D, tokens, batch.blocks, heads, show_logits)
        return loss, stats

    def compute_hidden_states(self, packed: Packed) -> Tensor:
        """Return [B*T, D] the last hidden states after the final norm."""
        return self.lm.base_model(**packed.inputs(self.lm.dtype)).last_hidden_state.flatten(0, 1)

    def compute_logprobs(self, packed: Packed, predict_N: Tensor, token_N: Tensor) -> Tensor:
        """Return [N] the log-prob of each token, from the hidden state at the position that predicts it."""
        logprob_N: Tensor = self.loss_head(self.compute_hidden_states(packed)[predict_N], token_N)
        return logprob_N

    def compute_top_logprobs(self, packed: Packed, predict_N: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """Return [N, K] the `k` likeliest tokens after each of these positions, and [N, K] their log-probs."""
        top: tuple[Tensor, Tensor] = self.loss_head(self.compute_hidden_states(packed)[predict_N], k)
        return top
