"""Float32 linear layers by oneDNN: used only where MKL is slow, and only if no digit is lost."""

from __future__ import annotations

import copy
import functools
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor, nn

from opd.models import linear_kernels

CPU = torch.device("cpu")


def make_machine(monkeypatch: pytest.MonkeyPatch, maker: str, instructions: str) -> None:
    monkeypatch.setattr(linear_kernels, "read_vendor", lambda: maker)
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: instructions)


def made(bias: bool) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(24, 77, bias=bias), nn.SiLU(), nn.Linear(77, 16, bias=bias))


def gradients(model: nn.Module, x: Tensor) -> list[Tensor]:
    x = x.clone().requires_grad_()
    y = model(x)
    y.square().sum().backward()
    return [y.detach(), x.grad, *(p.grad for p in model.parameters())]  # type: ignore[list-item]


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("shape", [(40, 24), (3, 130, 24)])
def test_layers_give_the_values_and_gradients_of_float64(
    monkeypatch: pytest.MonkeyPatch, bias: bool, shape: tuple[int, ...]
) -> None:
    monkeypatch.setattr(linear_kernels, "is_onednn_faster", lambda: True)
    x, model = torch.randn(*shape, generator=torch.Generator().manual_seed(1)), made(bias)
    wanted = gradients(copy.deepcopy(model).double(), x.double())
    exact = (
        linear_kernels.with_onednn_products(linear_kernels.measure_product_error)() < linear_kernels.MAX_PRODUCT_ERROR
    )
    assert linear_kernels.use_quick_products(model, CPU)
    assert all("forward" in vars(m) for m in model if isinstance(m, nn.Linear))
    for found, right in zip(gradients(model, x), wanted, strict=True):
        # On cores with AMX `quick_here` says no, because products are rounded to bfloat16 there.
        assert float((found - right).norm() / right.norm()) < (1e-6 if exact else 2e-2)
    assert torch.get_float32_matmul_precision() == "highest"


def test_a_frozen_layer_has_no_gradient_and_a_bfloat16_one_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear_kernels, "is_onednn_faster", lambda: True)
    model = made(bias=False)
    model[0].weight.requires_grad_(False)
    model[2].to(torch.bfloat16)
    linear_kernels.use_quick_products(model, CPU)
    assert "forward" in vars(model[0]) and "forward" not in vars(model[2])
    x = torch.randn(5, 24, requires_grad=True)
    y = model[0](x)
    assert y.grad_fn is not None
    kept_x, kept_weight = y.grad_fn.saved_tensors  # type: ignore[attr-defined]
    assert kept_x is None and kept_weight is model[0].weight, "a frozen layer keeps no inputs"
    y.sum().backward()
    assert model[0].weight.grad is None and x.grad is not None


def test_deepspeeds_function_is_told_around_each_of_its_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    from deepspeed.runtime.zero.linear import LinearFunctionForZeroStage3 as Sharded

    seen: list[str] = []

    def noting(plain: Callable[..., object]) -> Callable[..., object]:
        @functools.wraps(plain)
        def noted(*args: object) -> object:
            seen.append(torch.get_float32_matmul_precision())
            return plain(*args)

        return noted

    for name in ("forward", "backward"):
        monkeypatch.setattr(Sharded, name, staticmethod(noting(getattr(Sharded, name))))
    monkeypatch.setattr(linear_kernels, "is_onednn_faster", lambda: True)
    assert linear_kernels.use_quick_products(made(bias=False), CPU, sharded=True)
    x, weight = torch.randn(9, 24, requires_grad=True), torch.randn(6, 24, requires_grad=True)
    Sharded.apply(x, weight).sum().backward()
    assert seen == [linear_kernels.ONEDNN_PRECISION] * 2
    assert torch.get_float32_matmul_precision() == "highest"


def test_one_that_rounds_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on cores with AMX, where oneDNN would multiply in bfloat16."""
    make_machine(monkeypatch, "AuthenticAMD", "AVX512")
    plain = torch.Tensor.__matmul__

    def rounded(a: Tensor, b: Tensor) -> Tensor:
        if a.dtype == torch.float32 and torch.get_float32_matmul_precision() == linear_kernels.ONEDNN_PRECISION:
            a, b = a.bfloat16().float(), b.bfloat16().float()
        return plain(a, b)

    monkeypatch.setattr(torch.Tensor, "__matmul__", rounded)
    assert (
        linear_kernels.with_onednn_products(linear_kernels.measure_product_error)()
        > 10 * linear_kernels.MAX_PRODUCT_ERROR
    )
    assert not linear_kernels.is_onednn_faster()
    assert torch.get_float32_matmul_precision() == "highest"


def test_threads_that_overlap_leave_the_process_as_it_was() -> None:
    first_in, second_in, first_out = threading.Event(), threading.Event(), threading.Event()
    seen: list[str] = []

    def first() -> None:
        first_in.set()
        assert second_in.wait(20)

    def second() -> None:
        second_in.set()
        assert first_out.wait(20)
        seen.append(torch.get_float32_matmul_precision())

    with ThreadPoolExecutor(2) as threads:
        a = threads.submit(linear_kernels.with_onednn_products(first))
        assert first_in.wait(20)
        b = threads.submit(linear_kernels.with_onednn_products(second))
        a.result(timeout=20)
        first_out.set()
        b.result(timeout=20)
    assert seen == [linear_kernels.ONEDNN_PRECISION], "the first one out leaves the second one what it needs"
    assert torch.get_float32_matmul_precision() == "highest"


@pytest.mark.parametrize(
    ("maker", "instructions", "device"),
    [
        (linear_kernels.INTEL, "AVX512", "cpu"),
        ("", "AVX512", "cpu"),
        ("AuthenticAMD", "AVX2", "cpu"),
        ("AuthenticAMD", "AVX512", "cuda"),
    ],
)
def test_mkl_stays_where_nothing_was_measured(
    monkeypatch: pytest.MonkeyPatch, maker: str, instructions: str, device: str
) -> None:
    make_machine(monkeypatch, maker, instructions)
    monkeypatch.setattr(linear_kernels, "measure_product_error", lambda: 4e-7)
    model = made(bias=False)
    assert not linear_kernels.use_quick_products(model, torch.device(device))
    assert "forward" not in vars(model[0])
    make_machine(monkeypatch, "AuthenticAMD", "AVX512")
    assert linear_kernels.use_quick_products(model, CPU)
