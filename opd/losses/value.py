"""The loss of a critic: how far the value of each state is from the return that followed it.

    L = sum_n w_n (v_n - g_n)^2

Its minimum is the mean return of each state, if the returns are those of lambda 1. The weights are those of the whole step,
so the loss is one mean over all trained tokens, however they are cut into ranks and micro-batches.
"""

from __future__ import annotations

import torch
from torch import Tensor


def value_loss(value_N: Tensor, return_N: Tensor, old_N: Tensor, clip: float | None) -> Tensor:
    """Return [N] the squared error of each value; the gradient is by `value_N`.

    With `clip` a value that left `old_N`, what it was when the step began, by more than the clip has no gradient if its error
    shrank by that: the larger of both errors counts.
    """
    error_N = (value_N - return_N).square()
    if clip is None:
        return error_N
    near_N = old_N + (value_N - old_N).clamp(-clip, clip)
    return torch.maximum(error_N, (near_N - return_N).square())
