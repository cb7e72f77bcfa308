"""Small functions on logits, and on the tensors that logits are made from.

Shapes: N tokens, D hidden width, V vocabulary rows.
"""

from __future__ import annotations

import torch
from torch import Tensor

from opd.models.logit_rule import LogitRule


def upcast_for_loss(values: Tensor) -> Tensor:
    """Convert to the type in which the loss is computed: float64 stays, everything else becomes float32."""
    return values if values.dtype == torch.float64 else values.float()


def pad_rows(values: Tensor, rows: int) -> Tensor:
    """Append `rows` rows of zeros."""
    return values if rows == 0 else torch.cat([values, values.new_zeros(rows, *values.shape[1:])])


def token_logprobs(hidden_N_D: Tensor, head_V_D: Tensor, token_N: Tensor, rule: LogitRule, chunk: int = 512) -> Tensor:
    """Return [N] the log-prob of each token, float32, computed a chunk of logits at a time."""
    parts = [
        rule.apply(h @ head_V_D.T).float().log_softmax(-1).gather(1, t[:, None])[:, 0]
        for h, t in zip(hidden_N_D.split(chunk), token_N.split(chunk), strict=True)
    ]
    return torch.cat(parts) if parts else torch.zeros(0)


def top_logprobs(
    hidden_N_D: Tensor, head_V_D: Tensor, k: int, rule: LogitRule, chunk: int = 512
) -> tuple[Tensor, Tensor]:
    """Return [N, K] the ids of the `k` likeliest tokens, or of all if they are fewer, and [N, K] their log-probs, float32, computed a chunk
    of logits at a time."""
    tops = [
        rule.apply(h @ head_V_D.T).float().log_softmax(-1).topk(min(k, len(head_V_D)), dim=-1)
        for h in hidden_N_D.split(chunk)
    ]
    return torch.cat([top.indices for top in tops]), torch.cat([top.values for top in tops])
