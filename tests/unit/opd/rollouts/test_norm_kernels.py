"""The CPU kernel's norms against the same in float64, through vLLM's own choice between it and torch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from opd.rollouts.norm_kernels import PROVIDER, use_norm_kernels

ROUNDING = {torch.float32: 1e-5, torch.bfloat16: 0.04}


@pytest.fixture(scope="module")
def ops() -> Iterator[Any]:
    """vLLM's operations as an engine on the CPU has them."""
    ir = pytest.importorskip("vllm.ir")
    from vllm.platforms import current_platform

    current_platform.import_kernels()
    if not hasattr(torch.ops._C, "rms_norm"):
        pytest.skip("this build of vLLM has no kernel for norms")
    before = [(op, op.get_priority()) for op in (ir.ops.rms_norm, ir.ops.fused_add_rms_norm)]
    use_norm_kernels()
    use_norm_kernels()  # a second engine in the process
    yield ir.ops
    for op, priority in before:
        op.set_default(priority)


def exact(x: Tensor, weight: Tensor) -> Tensor:
    x = x.double()
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5) * weight.double()


def drawn(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


@pytest.mark.parametrize("dtype", ROUNDING)
@pytest.mark.parametrize("shape", [(7, 576), (1, 24), (5, 3, 64)])
def test_the_kernel_is_used_and_right(ops: Any, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x, weight = drawn(*shape, dtype=dtype), drawn(shape[-1], dtype=dtype)
    assert ops.rms_norm.dispatch(x, weight, 1e-5).provider == PROVIDER
    assert torch.allclose(ops.rms_norm(x, weight, 1e-5).double(), exact(x, weight), atol=ROUNDING[dtype], rtol=0.01)


@pytest.mark.parametrize("dtype", ROUNDING)
def test_the_sum_with_the_residual_is_kept(ops: Any, dtype: torch.dtype) -> None:
    x, residual, weight = (drawn(*shape, dtype=dtype) for shape in ((9, 64), (9, 64), (64,)))
    residual = residual.flip(0)
    total = (x.double() + residual.double()).to(dtype)
    assert ops.fused_add_rms_norm.dispatch(x, residual, weight, 1e-5).provider == PROVIDER
    normed, kept = ops.fused_add_rms_norm.maybe_inplace(x.clone(), residual.clone(), weight, 1e-5)
    assert torch.equal(kept, total)
    assert torch.allclose(normed.double(), exact(total, weight), atol=ROUNDING[dtype], rtol=0.01)


def test_what_the_kernel_cannot_read_stays_with_torch(ops: Any) -> None:
    """It would read the rows of a view as if they lay one after the other."""
    view, weight = drawn(7, 3, 64, dtype=torch.float32).transpose(0, 1), drawn(64, dtype=torch.float32)
    odd, half = drawn(7, 20, dtype=torch.float32), weight.to(torch.bfloat16)
    for x, w in ((view, weight), (odd, weight[:20]), (view.contiguous(), half), (view.contiguous(), None)):
        assert ops.rms_norm.dispatch(x, w, 1e-5).provider == "native"
    assert ops.rms_norm.dispatch(view.contiguous(), weight, 1e-5, 32).provider == "native"
    assert torch.allclose(ops.rms_norm(view, weight, 1e-5).double(), exact(view, weight), atol=1e-5)
    other = drawn(3, 7, 64, dtype=torch.float32)
    for x, residual in ((view, other), (other, view), (other, other.double())):
        assert ops.fused_add_rms_norm.dispatch(x, residual, weight, 1e-5).provider == "native"
