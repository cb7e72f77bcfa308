"""AdamW as every trainer of this project sets it up."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from opd.models.weights import whole_shape


@dataclass(frozen=True, slots=True, kw_only=True)
class AdamWOptions:
    """Settings of AdamW, except for the learning rate."""

    betas: tuple[float, float]
    """Decay of the first and of the second moment."""
    epsilon: float
    """Added to the root of the second moment."""
    weight_decay: float
    """Weight decay, on matrices only."""


def build_adamw(module: nn.Module, options: AdamWOptions, *, lr: float) -> torch.optim.AdamW:
    """Build AdamW over all parameters of `module` that are trained.

    torch's fused AdamW makes one pass over the numbers, without temporary tensors. The default makes two tensors of the size of a
    parameter, and ZeRO-3 hands it all weights of a rank as one parameter.
    """
    groups = split_parameters(module, options.weight_decay)
    return torch.optim.AdamW(groups, lr=lr, betas=options.betas, eps=options.epsilon, fused=True)


def split_parameters(module: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Split the trained parameters into those with weight decay, which are the matrices, and those without: norms, biases, and sparse
    indexers inside of a model. transformers computes an indexer without gradients, so decay alone would move it.

    A group without parameters is left out.
    """
    decays = {
        p: len(whole_shape(p)) >= 2 and ".indexer." not in name
        for name, p in module.named_parameters()
        if p.requires_grad
    }
    groups = [
        {"params": [p for p, decay in decays.items() if decay], "weight_decay": weight_decay},
        {"params": [p for p, decay in decays.items() if not decay], "weight_decay": 0.0},
    ]
    return [g for g in groups if g["params"]]
