"""Float32 products by oneDNN: used only where MKL is slow, and only if no digit is lost."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from opd import products
from opd.devices import computing_device

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(products.HIGHEST)
    yield
    torch.set_float32_matmul_precision(before)


def make_machine(monkeypatch: pytest.MonkeyPatch, maker: str, instructions: str) -> None:
    monkeypatch.setattr(products, "maker", lambda: maker)
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: instructions)


def test_whatever_is_chosen_here_products_are_exact_in_both_passes() -> None:
    """Many shapes, a layer's forward and backward pass: none is further from float64 than float32 has to be."""
    products.use_quick_products(CPU)
    random = torch.Generator().manual_seed(1)
    for rows, columns, outputs in ((1, 8, 3), (7, 77, 128), (200, 128, 77), (513, 344, 128), (1024, 64, 31)):
        x_N_I = torch.randn(rows, columns, generator=random, requires_grad=True)
        w_O_I = torch.randn(outputs, columns, generator=random, requires_grad=True)
        grad_N_O = torch.randn(rows, outputs, generator=random)
        torch.nn.functional.linear(x_N_I, w_O_I).backward(grad_N_O)
        for found, a, b in ((x_N_I.grad, grad_N_O, w_O_I.detach()), (w_O_I.grad, grad_N_O.T, x_N_I.detach())):
            assert found is not None
            wanted, size = a.double() @ b.double(), a.double().abs() @ b.double().abs()
            assert float(((found - wanted).abs() / size).max()) < products.EXACT


def test_one_that_rounds_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on cores with AMX, where oneDNN would multiply in bfloat16."""
    make_machine(monkeypatch, "AuthenticAMD", "AVX512")

    def rounded(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        if a.dtype == torch.float32 and torch.get_float32_matmul_precision() == products.LESS:
            a, b = a.bfloat16().float(), b.bfloat16().float()
        return plain(a, b)

    plain = torch.Tensor.__matmul__
    monkeypatch.setattr(torch.Tensor, "__matmul__", rounded)
    assert not products.use_quick_products(CPU)
    assert torch.get_float32_matmul_precision() == products.HIGHEST
    torch.set_float32_matmul_precision(products.LESS)
    assert products.product_error() > 10 * products.EXACT


def test_one_that_does_not_round_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    make_machine(monkeypatch, "AuthenticAMD", "AVX512")
    monkeypatch.setattr(products, "product_error", lambda: 4e-7)
    assert computing_device("cpu") == CPU
    assert torch.get_float32_matmul_precision() == products.LESS


@pytest.mark.parametrize(
    ("maker", "instructions", "device"),
    [
        (products.INTEL, "AVX512", "cpu"),
        ("", "AVX512", "cpu"),
        ("AuthenticAMD", "AVX2", "cpu"),
        ("AuthenticAMD", "AVX512", "cuda"),
    ],
)
def test_mkl_stays_where_nothing_was_measured(
    monkeypatch: pytest.MonkeyPatch, maker: str, instructions: str, device: str
) -> None:
    make_machine(monkeypatch, maker, instructions)
    assert not products.use_quick_products(torch.device(device))
    assert torch.get_float32_matmul_precision() == products.HIGHEST
