"""Losses of a draft against finite differences in float64 and against what rejection sampling keeps."""

from __future__ import annotations

from typing import get_args

import pytest
import torch
from torch import Tensor

from opd.losses.draft import DraftLoss, compute_draft_loss, compute_overlaps

C, K, V = 3, 4, 7


def make_case(seed: int = 0) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Probabilities of 5 of 7 tokens' worth of mass, logits, tokens and starts of 4, 2 and no guesses."""
    random = torch.Generator().manual_seed(seed)
    p = torch.randn(C, K, V + 2, generator=random, dtype=torch.float64).softmax(-1)[..., :V]
    logits = torch.randn(C, K, V, generator=random, dtype=torch.float64)
    token = torch.randint(-1, V, (C, K), generator=random)
    valid = torch.arange(K) < torch.tensor([4, 2, 0])[:, None]
    return p, logits, token, valid


@pytest.mark.parametrize("kind", get_args(DraftLoss))
def test_gradients_are_those_of_finite_differences(kind: DraftLoss) -> None:
    p, logits, token, valid = make_case()
    logits.requires_grad_()
    assert torch.autograd.gradcheck(lambda z: compute_draft_loss(kind, p, z, token, valid, 0.8), (logits,))
    loss = compute_draft_loss(kind, p, logits, token, valid, 0.8)
    (grad,) = torch.autograd.grad(loss.sum(), logits)
    assert loss[2] == 0 and not grad[~valid].any(), "what is not to be judged has no loss"
    assert grad[valid].abs().sum(-1).gt(0).any()


def test_end_to_end_tv_is_one_less_the_mean_share_of_guesses_that_are_kept() -> None:
    p, logits, token, valid = make_case()
    kept = compute_overlaps(p, logits)
    expected = 1 - (kept[0, 0] + kept[0, :2].prod() + kept[0, :3].prod() + kept[0].prod()) / 4
    loss = compute_draft_loss("end_to_end_tv", p, logits, token, valid, 1.0)
    torch.testing.assert_close(loss[0], expected)
    torch.testing.assert_close(loss[1], 1 - (kept[1, 0] + kept[1, :2].prod()) / 2)


def test_the_overlap_is_what_rejection_sampling_keeps() -> None:
    p, logits, _, _ = make_case()
    q = logits[0, 0].softmax(-1)
    random = torch.Generator().manual_seed(1)
    guesses = torch.multinomial(q, 40_000, replacement=True, generator=random)
    ratio = (p[0, 0] / q)[guesses].clamp(max=1)
    kept = (torch.rand(len(guesses), generator=random, dtype=torch.float64) < ratio).double().mean()
    assert kept == pytest.approx(float(compute_overlaps(p, logits)[0, 0]), abs=0.01)


def test_a_draft_that_is_the_student_has_no_divergence() -> None:
    _, logits, token, _ = make_case()
    valid, p = torch.ones(C, K, dtype=torch.bool), logits.softmax(-1)
    for kind in ("forward_kl", "tv", "log_overlap", "end_to_end_tv"):
        assert compute_draft_loss(kind, p, logits, token, valid, 0.8).abs().max() < 1e-12  # type: ignore[arg-type]


def test_the_log_of_the_overlap_has_a_gradient_where_tv_has_none() -> None:
    logits = torch.tensor([[[30.0, 0.0, 0.0]]], dtype=torch.float64, requires_grad=True)
    p = torch.tensor([[[0.0, 1.0, 0.0]]], dtype=torch.float64)
    args = (torch.tensor([[1]]), torch.tensor([[True]]), 1.0)
    sizes = {}
    for kind in ("tv", "log_overlap"):
        (grad,) = torch.autograd.grad(compute_draft_loss(kind, p, logits, *args).sum(), logits)  # type: ignore[arg-type]
        sizes[kind] = float(grad.abs().max())
    assert sizes["tv"] < 1e-9 and sizes["log_overlap"] == pytest.approx(1.0)
