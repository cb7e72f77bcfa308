"""RMS norms by vLLM's own CPU kernel.

vLLM's CPU build has a kernel for a whole norm, but uses it on GPUs only: on a CPU its compiler is meant to fuse the ten operations of a
norm. Engines here run eagerly (`opd.rollouts.cpu_settings`), so each of these operations would go through memory. Reading prompts of 150 tokens
and writing 8 to each took 1.34 s with the operations and 1.07 s with the kernel; with prompts of 43 and responses of 64 tokens it took 5.0
and 4.4 s (SmolLM2-135M in bfloat16, two cores). The kernel rounds once, the operations round twice.
"""

from __future__ import annotations

import torch
from torch import Tensor

PROVIDER = "opd_cpu"
"""The name by which vLLM knows these implementations."""
LANES = 8
"""The kernel takes only rows whose width is a multiple of this number."""


def use_norm_kernels() -> None:
    """Have all engines of this process compute norms by the kernel where it takes the tensors. A build without the kernel stays as it is."""
    from vllm import ir

    if not hasattr(torch.ops._C, "rms_norm"):
        return
    if PROVIDER not in ir.ops.rms_norm.impls:
        ir.ops.rms_norm.register_impl(PROVIDER, supports_args=_kernel_accepts)(_rms_norm)
        ir.ops.fused_add_rms_norm.register_impl(PROVIDER, supports_args=_kernel_accepts_both, inplace=True)(
            _add_and_norm
        )
    ir.ops.rms_norm.set_default([PROVIDER, "native"])
    ir.ops.fused_add_rms_norm.set_default([PROVIDER, "native"])


# The parameters below must have these names and types: vLLM compares them with those of its own operation.


def _kernel_accepts(x: Tensor, weight: Tensor | None, epsilon: float, variance_size: int | None = None) -> bool:
    """Return True if the kernel can take the tensor. It ignores strides, so it would read the rows of a view wrongly, without an error."""
    plain = variance_size is None and weight is not None and weight.dtype == x.dtype
    return plain and x.is_contiguous() and x.shape[-1] % LANES == 0


def _kernel_accepts_both(
    x: Tensor, x_residual: Tensor, weight: Tensor | None, epsilon: float, variance_size: int | None = None
) -> bool:
    return (
        _kernel_accepts(x, weight, epsilon, variance_size)
        and x_residual.is_contiguous()
        and x_residual.dtype == x.dtype
    )


def _rms_norm(x: Tensor, weight: Tensor | None, epsilon: float, variance_size: int | None = None) -> Tensor:
    normed = torch.empty_like(x)
    torch.ops._C.rms_norm(normed, x, weight, epsilon)
    return normed


def _add_and_norm(
    x: Tensor, x_residual: Tensor, weight: Tensor | None, epsilon: float, variance_size: int | None = None
) -> tuple[Tensor, Tensor]:
    """Add the residual and compute the norm in place: the norm takes the place of `x`, and the sum that of the residual."""
    torch.ops._C.fused_add_rms_norm(x, x_residual, weight, epsilon)
    return x, x_residual
