"""Float32 linear layers by oneDNN, where MKL computes them at half the speed.

On a CPU torch has MKL compute products of float32. One core of an AMD EPYC (Zen 5) computed 105 GFLOP/s with MKL and 230 with oneDNN
(1,627 rows of 128 numbers by 344 columns). torch asks oneDNN only where it is told that products may be rounded to bfloat16. Those cores have
no AMX, and no product was rounded: 300 of many shapes were as exact as MKL's. So it is told, and each process first looks at a product: one that is
rounded leaves all to MKL. Intel's processors were not measured, and keep MKL.

It is told around linear layers alone. With it in attention, which has many products of a few rows each, the backward pass of attention took
five times as long.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from opd.machine.processor import read_vendor

T = TypeVar("T")
INTEL = "GenuineIntel"
ONEDNN_PRECISION = "medium"
"""torch's name for products by oneDNN, which may be rounded."""
MAX_PRODUCT_ERROR = 1e-5
"""Error of a float32 product, as a part of the sum of its terms without their signs. It is about 4e-7; that of bfloat16 is 4e-3."""


def use_quick_products(model: nn.Module, device: torch.device, *, sharded: bool = False) -> bool:
    """Have the float32 linear layers of `model` computed by oneDNN if `device` is a CPU, MKL is slow on it, and no digit is lost.

    With `sharded` the layers multiply by DeepSpeed's function, which knows where their weights are. Returns whether it is so now.
    """
    if device.type != "cpu" or not is_onednn_faster():
        return False
    if sharded:
        from deepspeed.runtime.zero.linear import LinearFunctionForZeroStage3 as Sharded

        Sharded.forward, Sharded.backward = (
            staticmethod(with_onednn_products(f)) for f in (Sharded.forward, Sharded.backward)
        )
        return True
    for module in model.modules():
        if type(module) is nn.Linear and module.weight.dtype == torch.float32:
            module.forward = functools.partial(_linear_forward, module)  # type: ignore[method-assign]
    return True


def is_onednn_faster() -> bool:
    """Return True if oneDNN is faster than MKL on this machine's cores, and as exact."""
    if read_vendor() in ("", INTEL) or torch.backends.cpu.get_cpu_capability() != "AVX512":
        return False
    with _ONEDNN:
        return measure_product_error() < MAX_PRODUCT_ERROR


def measure_product_error() -> float:
    """Return the largest error of a float32 product under torch's present settings, measured like `MAX_PRODUCT_ERROR`."""
    random = torch.Generator().manual_seed(0)
    a_M_K, b_N_K = (torch.randn(rows, 512, generator=random) for rows in (96, 128))
    wanted_M_N = a_M_K.double() @ b_N_K.double().T
    sum_M_N = a_M_K.double().abs() @ b_N_K.double().abs().T
    return float(((a_M_K @ b_N_K.T - wanted_M_N).abs() / sum_M_N).max())


def with_onednn_products(function: Callable[..., T]) -> Callable[..., T]:
    """Wrap a function so that oneDNN computes its products."""

    @functools.wraps(function)
    def wrapped(*args: Any) -> T:
        with _ONEDNN:
            return function(*args)

    return wrapped


class _OneDNN:
    """Products by oneDNN as long as at least one thread is in it. The setting is the whole process's: the first thread in makes it, the
    last one out takes it back, and other threads' products are under it meanwhile."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._num_threads = 0
        self._old_precision = ""

    def __enter__(self) -> None:
        with self._lock:
            if not self._num_threads:
                self._old_precision = torch.get_float32_matmul_precision()
                torch.set_float32_matmul_precision(ONEDNN_PRECISION)
            self._num_threads += 1

    def __exit__(self, *error: object) -> None:
        with self._lock:
            self._num_threads -= 1
            if not self._num_threads:
                torch.set_float32_matmul_precision(self._old_precision)


_ONEDNN = _OneDNN()


def _linear_forward(module: nn.Linear, x_Z_I: Tensor) -> Tensor:
    y_Z_O: Tensor = Product.apply(x_Z_I, module.weight)
    return y_Z_O if module.bias is None else y_Z_O + module.bias


class Product(torch.autograd.Function):
    """A linear layer without its bias; Z are any leading dimensions, I inputs, O outputs."""

    @staticmethod
    @with_onednn_products
    def forward(ctx: Any, x_Z_I: Tensor, weight_O_I: Tensor) -> Tensor:
        wants_x, wants_weight = ctx.needs_input_grad
        # A frozen layer, as below an adapter, keeps no inputs: they are for the gradient of its weight alone.
        ctx.save_for_backward(x_Z_I if wants_weight else None, weight_O_I if wants_x else None)
        return x_Z_I @ weight_O_I.T

    @staticmethod
    @with_onednn_products
    def backward(ctx: Any, grad_Z_O: Tensor) -> tuple[Tensor | None, Tensor | None]:
        x_Z_I, weight_O_I = ctx.saved_tensors
        wants_x, wants_weight = ctx.needs_input_grad
        grad_x_Z_I = grad_Z_O @ weight_O_I if wants_x else None
        grad_O_I = grad_Z_O.flatten(0, -2).T @ x_Z_I.flatten(0, -2) if wants_weight else None
        return grad_x_Z_I, grad_O_I
