"""The loss of a critic against float64 finite differences, through head and clip."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from opd.losses.value import value_loss
from opd.train.value import ValueHead

GEN = torch.Generator().manual_seed(0)
HIDDEN = torch.randn(9, 4, generator=GEN, dtype=torch.float64)
RETURN = torch.randn(9, generator=GEN, dtype=torch.float64)
OLD = 0.5 * torch.randn(9, generator=GEN, dtype=torch.float64)
WEIGHT = torch.rand(9, generator=GEN, dtype=torch.float64)


def loss(head: ValueHead, hidden_N_D: Tensor, clip: float | None) -> Tensor:
    return (WEIGHT * value_loss(head(hidden_N_D), RETURN, OLD, clip)).sum()


@pytest.mark.parametrize("clip", [None, 0.2, 0.6])
def test_the_gradient_is_that_of_finite_differences(clip: float | None) -> None:
    head = ValueHead(4, torch.float64)
    torch.nn.init.normal_(head.weight, generator=torch.Generator().manual_seed(1))
    hidden = HIDDEN.clone().requires_grad_()
    loss(head, hidden, clip).backward()  # type: ignore[no-untyped-call]
    for tensor in (head.weight, head.bias, hidden):
        assert tensor.grad is not None
        flat, step = tensor.detach().view(-1), 1e-6
        for place in range(flat.numel()):
            ends = []
            for sign in (1, -1):
                kept = float(flat[place])
                flat[place] = kept + sign * step
                ends.append(float(loss(head, hidden, clip).detach()))
                flat[place] = kept
            assert float(tensor.grad.view(-1)[place]) == pytest.approx((ends[0] - ends[1]) / (2 * step), abs=1e-7)


def test_a_value_that_left_its_bound_toward_the_return_is_pushed_no_further() -> None:
    old, target = torch.zeros(4), torch.tensor([1.0, 1.0, -1.0, 1.0])
    value = torch.tensor([0.1, 0.5, 0.5, -0.5], requires_grad=True)
    value_loss(value, target, old, 0.2).sum().backward()  # type: ignore[no-untyped-call]
    assert value.grad is not None
    assert value.grad.tolist() == pytest.approx([-1.8, 0.0, 3.0, -3.0]), "inside, gone far enough, gone wrong twice"
    assert value_loss(value, target, old, 0.2)[1].item() == pytest.approx(0.64), "the error of the bound"


def test_a_head_that_learnt_nothing_says_nothing_and_learns_at_once() -> None:
    head = ValueHead(4, torch.float32)
    assert head(HIDDEN.float()).tolist() == [0.0] * 9
    value_loss(head(HIDDEN.float()), RETURN.float(), OLD.float(), None).sum().backward()  # type: ignore[no-untyped-call]
    assert head.weight.grad is not None and head.weight.grad.abs().min() > 0


def test_values_are_float32_whatever_the_backbone_computes_in() -> None:
    assert ValueHead(4, torch.bfloat16)(HIDDEN.bfloat16()).dtype == torch.float32
