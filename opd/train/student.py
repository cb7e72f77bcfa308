"""The student as the trainer runs it: the model's body, and its output head inside a module that computes the loss.

Under ZeRO-3 a parameter is whole only inside the forward of the module that owns it. The loss is therefore a module
that owns the head's weight (the same Parameter, tied or not): DeepSpeed gathers it around the loss, and the gradient
of both uses of a tied weight arrives in one accumulation.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from opd.layouts import Packed
from opd.losses.blocks import Block
from opd.losses.chunked import Loss, Tokens, TokenStats, chunked_objective
from opd.losses.logits import token_logprobs
from opd.losses.objective import Objective
from opd.stream.heads import Head, logit_rule
from opd.train.batch import MicroBatch


class LossHead(nn.Module):
    """Owns the output head; computes the objective or plain log-probs from hidden states."""

    def __init__(self, weight_V_D: nn.Parameter, loss: Loss) -> None:
        super().__init__()
        self.weight = weight_V_D
        self._loss = loss

    def forward(
        self,
        hidden_N_D: Tensor,
        batch: MicroBatch | None,
        blocks: Sequence[Block],
        weight_N: Tensor | None,
        token_N: Tensor,
    ) -> Any:
        if batch is None or weight_N is None:
            head_v_D = self.weight[: self._loss.vocab_size]  # padding rows have no probability here either
            return token_logprobs(hidden_N_D, head_v_D, token_N, self._loss.rule)
        tokens = Tokens(token_N, weight_N, batch.behaviour_N)
        return chunked_objective(self._loss, hidden_N_D, self.weight, blocks, tokens)


class Student(nn.Module):
    """`lm` is a transformers causal LM; only its body is called, its head lives in `loss_head`."""

    def __init__(
        self,
        lm: Any,
        objective: Objective,
        *,
        chunk: int,
        vocab_size: int,
        compiled: bool = False,
        temperature: float = 1.0,
    ) -> None:
        super().__init__()
        self.lm = lm
        loss = Loss(
            objective=objective,
            chunk=chunk,
            vocab_size=vocab_size,
            rule=logit_rule(lm.config),
            compiled=compiled,
            temperature=temperature,
        )
        self.loss_head = LossHead(lm.get_output_embeddings().weight, loss)

    def forward(self, batch: MicroBatch, heads: Mapping[str, Head], weight_N: Tensor) -> tuple[Tensor, TokenStats]:
        """The micro-batch's share of the loss, and per-token numbers."""
        hidden_N_D = self.hidden(batch.packed)[batch.predict_N]
        blocks = [block.with_heads(heads) for block in batch.blocks]
        return self.loss_head(hidden_N_D, batch, blocks, weight_N, batch.token_N)

    def hidden(self, packed: Packed) -> Tensor:
        """[B*T, D] last hidden state after the final norm."""
        return self.lm.base_model(**packed.inputs()).last_hidden_state.flatten(0, 1)

    def logprobs(self, packed: Packed, predict_N: Tensor, token_N: Tensor) -> Tensor:
        """[N] log-prob of each token, from the hidden state at the position that predicts it."""
        log_prob_N: Tensor = self.loss_head(self.hidden(packed)[predict_N], None, (), None, token_N)
        return log_prob_N
