"""AdamW in pieces gives the bits of AdamW, and makes no tensor of a parameter's size."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from opd.train import optimizer
from opd.train.optimizer import AdamWOptions, adamw

OPTIONS = AdamWOptions(betas=(0.9, 0.95), epsilon=1e-8, weight_decay=0.1)


def module(rows: int) -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(67, rows)


@pytest.mark.parametrize("rows", [1, 97, 977])
def test_pieces_change_no_bit(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(optimizer, "PIECE", 1 << 12)
    whole, pieces = module(rows), module(rows)
    steps = [adamw(whole, OPTIONS, lr=1e-2), adamw(pieces, OPTIONS, lr=1e-2, in_pieces=True)]
    for _ in range(3):
        for param, other in zip(whole.parameters(), pieces.parameters(), strict=True):
            param.grad = torch.randn_like(param)
            other.grad = param.grad.clone()
        for one in steps:
            one.step()
    for param, other in zip(whole.parameters(), pieces.parameters(), strict=True):
        assert torch.equal(param, other)
        ours, theirs = steps[1].state[other], steps[0].state[param]
        assert ours.keys() == theirs.keys() and all(torch.equal(ours[key], theirs[key]) for key in theirs)
    assert steps[1].state[next(pieces.parameters())]["step"] == 3


def test_a_step_needs_memory_for_a_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(optimizer, "PIECE", 1 << 12)
    model = module(977)
    one = adamw(model, OPTIONS, lr=1e-2, in_pieces=True)
    for _ in range(2):  # the first step makes the moments
        for param in model.parameters():
            param.grad = torch.ones_like(param)
        with torch.profiler.profile(profile_memory=True, activities=[torch.profiler.ProfilerActivity.CPU]) as seen:
            one.step()
    assert 0 < max(event.cpu_memory_usage for event in seen.events()) <= 4 * (1 << 12)
