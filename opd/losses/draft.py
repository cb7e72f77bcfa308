"""Losses of a draft q that guesses the next K tokens of a student p, each from the student's exact probabilities.

With rejection sampling a guess is kept with probability a_k = sum_v min(p_v, q_v) = 1 - TV_k. Along a text y that the student wrote, the
product of min(1, q(y_i) / p(y_i)) over i <= j is an unbiased estimate of the probability that the first j guesses are kept; the product
of a_i, which the loss takes because its gradient is less noisy, is one where guesses are kept independently.

    cross_entropy   -log q(y) of the token y that was written
    forward_kl      KL(p || q)
    tv              1 - a
    log_overlap     -log a; its gradient does not vanish at low overlap, as that of `tv` does (Samarin et al., "LK losses")
    end_to_end_tv   1 - (1/g) sum_j prod_(i<=j) a_i over the g guesses of a start (Bebop, arXiv 2606.12370)

A draft may have fewer tokens than the student: columns are the draft's tokens, and `p` of them need not sum to 1. Tokens that it lacks
have q = 0, and nothing is asked of it there.

Shapes: C starts, K guesses of each, V the draft's tokens.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from opd.config.draft import DraftLoss

LEAST_OVERLAP = 1e-37
"""Overlap below which `log_overlap` is cut, so that a guess without any common token has a finite loss; float32 holds it."""


def compute_overlaps(p_C_K_V: Tensor, logits_C_K_V: Tensor) -> Tensor:
    """Return [C, K] the probability with which each guess would be kept: sum_v min(p_v, q_v)."""
    return torch.minimum(p_C_K_V, logits_C_K_V.softmax(-1)).sum(-1)


def estimate_kept(p_C_K_V: Tensor, logits_C_K_V: Tensor, token_C_K: Tensor) -> Tensor:
    """Return [C, K] min(1, q(y) / p(y)) of the tokens y that the student wrote; 0 for a token that the draft lacks."""
    column_C_K_1 = token_C_K.clamp(min=0)[..., None]
    logq_C_K = logits_C_K_V.log_softmax(-1).gather(-1, column_C_K_1)[..., 0]
    p_C_K = p_C_K_V.gather(-1, column_C_K_1)[..., 0]
    return (logq_C_K - p_C_K.log()).exp().clamp(max=1.0).where(token_C_K >= 0, 0.0)


def compute_draft_loss(
    kind: DraftLoss, p_C_K_V: Tensor, logits_C_K_V: Tensor, token_C_K: Tensor, valid_C_K: Tensor, decay: float
) -> Tensor:
    """Return [C] the loss of each start; only `logits_C_K_V` has a gradient.

    `p_C_K_V`: student's probabilities of the draft's tokens. `token_C_K`: column of the token that was written, -1 for one that the draft
    lacks. `valid_C_K`: True where there is a guess to judge; a start's first guesses, without a gap. Guess k, from 0, counts
    `decay`**k; `end_to_end_tv` weighs by its products alone. A start without a guess has loss 0.
    """
    if kind == "end_to_end_tv":
        kept_C_K = compute_overlaps(p_C_K_V, logits_C_K_V).where(valid_C_K, 0.0).cumprod(-1)
        count_C = valid_C_K.sum(-1)
        return (count_C > 0).to(kept_C_K.dtype) - kept_C_K.sum(-1) / count_C.clamp(min=1)
    value_C_K = _PER_GUESS[kind](p_C_K_V, logits_C_K_V, token_C_K)
    weight_C_K = valid_C_K * decay ** torch.arange(valid_C_K.shape[1], device=valid_C_K.device, dtype=value_C_K.dtype)
    total_C = weight_C_K.sum(-1)
    return (value_C_K.where(valid_C_K, 0.0) * weight_C_K).sum(-1) / total_C.where(total_C > 0, 1.0)


def _cross_entropy(p_C_K_V: Tensor, logits_C_K_V: Tensor, token_C_K: Tensor) -> Tensor:
    logq_C_K_V = logits_C_K_V.log_softmax(-1)
    chosen_C_K = logq_C_K_V.gather(-1, token_C_K.clamp(min=0)[..., None])[..., 0]
    return -chosen_C_K.where(token_C_K >= 0, 0.0)


def _forward_kl(p_C_K_V: Tensor, logits_C_K_V: Tensor, token_C_K: Tensor) -> Tensor:
    return (torch.special.xlogy(p_C_K_V, p_C_K_V) - p_C_K_V * logits_C_K_V.log_softmax(-1)).sum(-1)


def _tv(p_C_K_V: Tensor, logits_C_K_V: Tensor, token_C_K: Tensor) -> Tensor:
    return 1 - compute_overlaps(p_C_K_V, logits_C_K_V)


def _log_overlap(p_C_K_V: Tensor, logits_C_K_V: Tensor, token_C_K: Tensor) -> Tensor:
    return -compute_overlaps(p_C_K_V, logits_C_K_V).clamp(min=LEAST_OVERLAP).log()


_PER_GUESS: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "cross_entropy": _cross_entropy,
    "forward_kl": _forward_kl,
    "tv": _tv,
    "log_overlap": _log_overlap,
}
"""Loss -> its value for each guess."""
