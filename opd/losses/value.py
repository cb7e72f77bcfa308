"""The loss of a critic: the squared difference of the value v of each state and the return g that followed it.

    L = sum_n w_n (v_n - g_n)^2

With returns of lambda 1 it is least where each value is the mean return of its state. The weights w are computed over the whole
step, so the loss is one mean over all trained tokens, however they are divided among ranks and micro-batches.
"""

from __future__ import annotations

import torch
from torch import Tensor


def value_loss(value_N: Tensor, return_N: Tensor, old_N: Tensor, clip: float | None) -> Tensor:
    """Return [N] the squared error of each value; only `value_N` has a gradient.

    `old_N` are the values when the step began. With `clip` the larger of two errors counts: that of the value, and that of the
    value held within `clip` of its old one. So a value that moved further than `clip`, and came closer to its return by that,
    has no gradient.
    """
    error_N = (value_N - return_N).square()
    if clip is None:
        return error_N
    held_N = old_N + (value_N - old_N).clamp(-clip, clip)
    return torch.maximum(error_N, (held_N - return_N).square())
