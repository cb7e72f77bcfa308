"""Memory of the loss, and its use: one chunk of logits, and gradients in place."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from opd.losses import chunked
from opd.losses.adaptive_kl import AdaptiveKL
from opd.losses.chunked import _round_in_place
from opd.losses.forward_kl import ForwardKL
from opd.losses.jsd import JSD
from opd.losses.reverse_kl import ReverseKL
from opd.losses.sampled import SampledKL
from opd.losses.skew import Skew
from opd.losses.top_k import TopK
from opd.payloads.hidden_states import TeacherBlock
from opd.payloads.top_k import TopKBlock
from tests.losses import chunked_objective

FLOAT = 4
"""Bytes of a float32."""


class Memory(TorchDispatchMode):
    """Counts what is allocated inside; the tensors handed to it were there before."""

    def __init__(self, *known: Tensor) -> None:
        super().__init__()
        self.largest = 0
        """Values of the largest tensor that was made."""
        self.peak = 0
        """Most bytes alive at one time."""
        self._known = {t.untyped_storage()._cdata for t in known}
        self._alive: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for made in out if isinstance(out, tuple | list) else (out,):
            if isinstance(made, Tensor) and made.untyped_storage()._cdata not in self._known:
                storage = made.untyped_storage()
                self.largest = max(self.largest, made.numel())
                self._alive[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
        self._alive = {key: value for key, value in self._alive.items() if not value[0].expired()}
        self.peak = max(self.peak, sum(nbytes for _, nbytes in self._alive.values()))
        return out


def measured(
    objective: Any = None, *, tokens: int, chunk: int, vocab: int, width: int, dtype: torch.dtype = torch.float32
) -> Memory:
    """One forward and backward pass."""
    gen = torch.Generator().manual_seed(0)

    def rand(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=gen).to(dtype)

    hidden, head = rand(tokens, width).requires_grad_(), rand(vocab, width).requires_grad_()
    teacher, teacher_head = rand(tokens, width), rand(vocab, width)
    weight, token = torch.ones(tokens), torch.randint(vocab, (tokens,), generator=gen)
    block: Any = TeacherBlock(teacher, teacher_head)
    known = [hidden, head, teacher, teacher_head, weight, token]
    if isinstance(objective, TopK):
        top = (teacher @ teacher_head.T).float().log_softmax(-1).topk(objective.k)
        block = TopKBlock(top.indices, top.values)
        known += [top.indices, top.values]
    with Memory(*known) as memory:
        loss, _ = chunked_objective(
            objective or ReverseKL(), hidden, head, [block], weight, token, chunk=chunk, vocab_size=vocab
        )
        loss.backward()
    assert head.grad is not None and head.grad.any()
    return memory


OBJECTIVES = [ReverseKL(), ForwardKL(), AdaptiveKL(), JSD(), Skew(), SampledKL(), TopK(k=4)]


@pytest.mark.parametrize("objective", OBJECTIVES, ids=str)
@pytest.mark.parametrize("chunks", [4, 8])
@pytest.mark.parametrize(("chunk", "width"), [(16, 2), (4, 32)], ids=["logits are larger", "the head is larger"])
def test_no_tensor_is_larger_than_a_chunk_of_logits_or_the_head(
    objective: Any, chunks: int, chunk: int, width: int
) -> None:
    vocab = 501
    memory = measured(objective, tokens=chunks * chunk, chunk=chunk, vocab=vocab, width=width)
    assert memory.largest == max(chunk * vocab, vocab * width)


@pytest.mark.parametrize("objective", OBJECTIVES, ids=str)
def test_memory_grows_by_a_tokens_own_numbers_only(objective: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    chunk, vocab, width = 32, 501, 8
    monkeypatch.setattr(chunked, "SLICE_VALUES", 2 * vocab)
    sizes = {"chunk": chunk, "vocab": vocab, "width": width}
    four, eight = (measured(objective, tokens=n * chunk, **sizes).peak for n in (4, 8))
    numbers = len(chunked.TokenStats.__slots__) + width + 1  # stats, the hidden state's gradient, behaviour log-prob
    assert 0 < eight - four <= 4 * chunk * numbers * FLOAT


@pytest.mark.parametrize("objective", OBJECTIVES, ids=str)
def test_the_gradient_takes_the_logits_place(objective: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The student's logits and the teacher's are the only [chunk, V] there are; what is made of them is a slice."""
    chunk, vocab, width = 64, 501, 4
    monkeypatch.setattr(chunked, "SLICE_VALUES", 2 * vocab)
    peak = measured(objective, tokens=2 * chunk, chunk=chunk, vocab=vocab, width=width).peak
    logits = chunk * vocab * FLOAT
    assert logits < peak < 2.5 * logits


def test_a_bfloat16_head_has_no_second_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    chunk, vocab, width = 2, 501, 256
    monkeypatch.setattr(chunked, "TILE_VALUES", 4 * width)
    peak = measured(tokens=8, chunk=chunk, vocab=vocab, width=width, dtype=torch.bfloat16).peak
    head = vocab * width * FLOAT  # a rounded copy would be half as much again
    assert head < peak < 1.1 * head


# Rounding in place


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("tile", [1, 7, 30, 1 << 20], ids=lambda n: f"tile {n}")
@pytest.mark.parametrize(("rows", "width"), [(1, 1), (1, 7), (2, 5), (13, 5), (64, 3), (101, 10)])
def test_rounding_in_place_is_rounding(
    dtype: torch.dtype, tile: int, rows: int, width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chunked, "TILE_VALUES", tile)
    grad = torch.randn(rows, width, generator=torch.Generator().manual_seed(rows)) * 3
    want, start = grad.to(dtype), grad.data_ptr()
    found = _round_in_place(grad, dtype)
    assert (found.dtype, found.shape, found.data_ptr()) == (dtype, grad.shape, start)
    assert found.is_contiguous()
    assert torch.equal(found.view(torch.int16), want.view(torch.int16)), "bit for bit"


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_what_has_the_right_type_is_left_alone(dtype: torch.dtype) -> None:
    grad = torch.randn(3, 5).to(dtype)
    assert _round_in_place(grad, dtype) is grad


@pytest.mark.parametrize("tile", [1, 6 * 4 + 1, 1 << 20])
@pytest.mark.parametrize("vocab", [23, 17], ids=["all rows", "padding rows"])
def test_a_bfloat16_head_gets_the_float32_gradient_rounded(
    vocab: int, tile: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    # One chunk and float32 states against the same states in bfloat16: what differs is the product's own rounding.
    monkeypatch.setattr(chunked, "TILE_VALUES", tile)
    gen = torch.Generator().manual_seed(2)
    hidden, head, states, teacher_head = (torch.randn(n, 6, generator=gen).bfloat16() for n in (9, 23, 9, 23))
    weight, token = torch.rand(9, generator=gen), torch.randint(vocab, (9,), generator=gen)
    unrounded: list[Tensor] = []

    def watched(grad_V_D: Tensor, dtype: torch.dtype) -> Tensor:
        unrounded.append(grad_V_D.clone())
        return _round_in_place(grad_V_D, dtype)

    monkeypatch.setattr(chunked, "_round_in_place", watched)
    head.requires_grad_()
    block = TeacherBlock(states, teacher_head)
    loss, _ = chunked_objective(ReverseKL(), hidden, head, [block], weight, token, chunk=4, vocab_size=vocab)
    (found,) = torch.autograd.grad(loss * 0.75, head)
    (exact,) = unrounded
    assert (exact.dtype, found.dtype) == (torch.float32, torch.bfloat16)
    assert torch.equal(found.view(torch.int16), exact.bfloat16().view(torch.int16))
    assert not found[vocab:].any()
    assert bool(found[:vocab].any(1).all())
    double = head.detach().double().requires_grad_()
    logp = (hidden.double() @ double[:vocab].T).log_softmax(-1)
    logq = (states.double() @ teacher_head[:vocab].double().T).log_softmax(-1)
    (logp.exp() * (logp - logq)).sum(-1).mul(0.75 * weight).sum().backward()
    assert double.grad is not None
    assert float((found - double.grad).norm() / double.grad.norm()) < 0.02


# One backward pass


def test_a_second_backward_pass_is_a_bug_of_the_caller() -> None:
    hidden, head = (torch.randn(n, 6, requires_grad=True) for n in (9, 23))
    block = TeacherBlock(torch.randn(9, 6), torch.randn(23, 6))
    loss, _ = chunked_objective(
        ReverseKL(), hidden, head, [block], torch.ones(9), torch.zeros(9, dtype=torch.long), chunk=4, vocab_size=23
    )
    loss.backward(retain_graph=True)
    assert head.grad is not None
    kept = head.grad.clone()
    with pytest.raises(AssertionError, match="a second time"):
        loss.backward()
    assert torch.equal(head.grad, kept), "what was in place is not scaled again"
