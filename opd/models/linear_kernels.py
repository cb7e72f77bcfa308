"""Float32 linear layers computed by oneDNN, on processors where MKL has half its speed.

On a CPU torch computes float32 products with MKL. One core of an AMD EPYC (Zen 5) computed 105 GFLOP/s with MKL and 230 with oneDNN
(1,627 rows of 128 numbers times 344 columns). But torch uses oneDNN only under a setting that allows it to round to bfloat16. Cores
without AMX do not round: on that EPYC, 300 products of many shapes were as exact as MKL's. So we make the setting, after each process
has measured the error of a product; if that was rounded, MKL computes everything. Intel's processors were not measured, and keep MKL.

The setting is made around linear layers only. Attention has many products of a few rows each, and its backward pass took five times
as long with oneDNN.
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
"""torch's float32 matmul precision under which it uses oneDNN, and allows products to be rounded."""
MAX_PRODUCT_ERROR = 1e-5
"""Largest error of a product that counts as exact, relative to the sum of the absolute values of its terms. Float32 has an error of
about 4e-7, bfloat16 of 4e-3."""


def use_quick_products(model: nn.Module, device: torch.device, *, sharded: bool = False) -> bool:
    """Have oneDNN compute the float32 linear layers of `model`, if `device` is a CPU on which it is faster and as exact.

    With `sharded` the layers use DeepSpeed's function for ZeRO-3, which is wrapped for the whole process. Returns True if oneDNN
    computes them now.
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
    """Return the largest error of a float32 product under torch's present settings, relative as in `MAX_PRODUCT_ERROR`."""
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
    """A context in which oneDNN computes products; several threads may be in it at once.

    torch's setting holds for the whole process. The first thread that enters makes it, and the last one that leaves takes it back.
    Meanwhile it holds for the products of all other threads too.
    """

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
    """The product of a linear layer, without its bias. Z stands for any leading dimensions, I for inputs, O for outputs."""

    @staticmethod
    @with_onednn_products
    def forward(ctx: Any, x_Z_I: Tensor, weight_O_I: Tensor) -> Tensor:
        wants_x, wants_weight = ctx.needs_input_grad
        # Inputs are needed only for the weight's gradient. A frozen layer, such as one below an adapter, does not keep them.
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
