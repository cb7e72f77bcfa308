"""Exact reverse KL over the whole vocabulary, from hidden states and output heads, a chunk of tokens at a time.

    L_t = KL(p_t || q_t) = sum_v p_tv (log p_tv - log q_tv),   p = softmax(h W^T),  q = softmax(g U^T)
    dL_t/dz_tv = p_tv ((log p_tv - log q_tv) - L_t),           z = h W^T

h, W are the student's last hidden state (after the final norm) and head, g, U the teacher's. The gradient is taken at
fixed states, as in DeepSeek-V4 (arXiv 2606.19348, section 5.1.2) and the on-policy distillation literature; teacher
quantities carry no gradient. Gradients are formed in the forward pass, so only [chunk, V] logits exist at a time and
the backward pass needs no head: under ZeRO-3 the student's head is gathered once.

Shapes: N response tokens, D student width, E teacher width, V vocabulary rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class TeacherBlock:
    """Consecutive tokens of a micro-batch that share one teacher head."""

    hidden_N_E: Tensor
    head_V_E: Tensor


@dataclass(frozen=True, slots=True)
class TokenStats:
    """Per response token, detached."""

    kl_N: Tensor
    """KL(student || teacher), nats, float32."""
    logprob_N: Tensor
    """Student's log-prob of the token that was sampled, float32."""


def reverse_kl(
    hidden_N_D: Tensor,
    head_V_D: Tensor,
    teachers: Sequence[TeacherBlock],
    weight_N: Tensor,
    token_N: Tensor,
    *,
    chunk: int,
    vocab_size: int,
) -> tuple[Tensor, TokenStats]:
    """sum_n weight_n KL(p_n || q_n) as a scalar with gradients for `hidden_N_D` and `head_V_D`, and per-token numbers.

    `teachers` cover the N tokens in order; `weight_N` is 0 where a token carries no loss; `token_N` are the sampled ids.
    Both vocabularies are cut to the first `vocab_size` rows: rows beyond the tokenizer are padding.
    Accumulates in float32, in float64 if the student's hidden states are float64.
    """
    assert sum(len(t.hidden_N_E) for t in teachers) == len(hidden_N_D) == len(weight_N) == len(token_N)
    loss, kl_N, logprob_N = _ReverseKL.apply(
        hidden_N_D, head_V_D, tuple(teachers), weight_N, token_N, chunk, vocab_size
    )
    return loss, TokenStats(kl_N.detach(), logprob_N.detach())


class _ReverseKL(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_N_D: Tensor,
        head_V_D: Tensor,
        teachers: tuple[TeacherBlock, ...],
        weight_N: Tensor,
        token_N: Tensor,
        chunk: int,
        vocab_size: int,
    ) -> tuple[Tensor, Tensor, Tensor]:
        need_head, need_hidden = ctx.needs_input_grad[1], ctx.needs_input_grad[0]
        acc = torch.float64 if hidden_N_D.dtype == torch.float64 else torch.float32
        head_v_D = head_V_D[:vocab_size]
        kl_N = torch.empty(len(hidden_N_D), dtype=acc, device=hidden_N_D.device)
        logprob_N = torch.empty_like(kl_N)
        grad_hidden_N_D = torch.zeros_like(hidden_N_D) if need_hidden else None
        grad_head_V_D = torch.zeros(head_V_D.shape, dtype=acc, device=head_V_D.device) if need_head else None
        start = 0
        for block in teachers:
            for h_C_D, g_C_E in zip(
                hidden_N_D[start : start + len(block.hidden_N_E)].split(chunk),
                block.hidden_N_E.split(chunk),
                strict=True,
            ):
                stop = start + len(h_C_D)
                logp_C_V = (h_C_D @ head_v_D.T).to(acc).log_softmax(-1)
                logq_C_V = (g_C_E @ block.head_V_E[:vocab_size].T).to(acc).log_softmax(-1)
                logprob_N[start:stop] = logp_C_V.gather(1, token_N[start:stop, None])[:, 0]
                ratio_C_V = logq_C_V.neg_().add_(logp_C_V)
                p_C_V = logp_C_V.exp_()
                kl_C = (p_C_V * ratio_C_V).sum(-1)
                kl_N[start:stop] = kl_C
                if need_hidden or need_head:
                    scale_C = weight_N[start:stop].to(acc)
                    grad_C_V = ratio_C_V.sub_(kl_C[:, None]).mul_(p_C_V).mul_(scale_C[:, None])
                    # A token without weight must not reach a sum: 0 * NaN is NaN.
                    grad_C_V = grad_C_V.masked_fill_(scale_C[:, None] == 0, 0).to(h_C_D.dtype)
                    if grad_hidden_N_D is not None:
                        grad_hidden_N_D[start:stop] = grad_C_V @ head_v_D
                    if grad_head_V_D is not None:
                        grad_head_V_D[:vocab_size] += grad_C_V.T @ h_C_D
                start = stop
        ctx.save_for_backward(grad_hidden_N_D, grad_head_V_D)
        ctx.head_dtype = head_V_D.dtype
        ctx.mark_non_differentiable(kl_N, logprob_N)
        loss = torch.where(weight_N != 0, kl_N * weight_N.to(acc), torch.zeros_like(kl_N)).sum()
        return loss, kl_N, logprob_N

    @staticmethod
    def backward(ctx: Any, grad_loss: Tensor, *_: Tensor) -> tuple[Any, ...]:
        grad_hidden_N_D, grad_head_V_D = ctx.saved_tensors
        hidden = None if grad_hidden_N_D is None else grad_hidden_N_D * grad_loss.to(grad_hidden_N_D.dtype)
        head = None if grad_head_V_D is None else (grad_head_V_D * grad_loss).to(ctx.head_dtype)
        return hidden, head, None, None, None, None, None
