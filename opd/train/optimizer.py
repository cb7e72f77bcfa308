"""AdamW as every trainer of this project sets it up."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from opd.model_weights import whole_shape

PIECE = 1 << 17
"""Numbers that AdamW works on at a time, where memory is bounded."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AdamWOptions:
    """Settings of AdamW, except for the learning rate."""

    betas: tuple[float, float]
    """Decay of the first and of the second moment."""
    epsilon: float
    """Added to the root of the second moment."""
    weight_decay: float
    """Weight decay, on matrices only."""


class AdamWInPieces(torch.optim.AdamW):
    """The same numbers as torch's AdamW, which makes two more tensors of a parameter's size and frees them, in every step.

    ZeRO-3 gives all weights of a rank as one parameter. On a GPU they stay whole, where each piece would be a launch.
    """

    def _init_group(self, group: dict[str, Any], *lists: list[Any]) -> bool:
        """Fill the lists that a step goes through: parameters, gradients, three moments, counts of steps."""
        whole: list[list[Any]] = [[] for _ in lists]
        has_complex: bool = super()._init_group(group, *whole)
        if any(param.is_cuda for param in whole[0]):
            pieces = whole
        else:
            *tensors, counts = whole
            pieces = [[piece for tensor in one for piece in tensor.view(-1).split(PIECE)] for one in tensors]
            numbers = [len(tensor.view(-1).split(PIECE)) for tensor in whole[0]]
            # Each piece counts the step; the parameter's own count is the first piece's.
            pieces.append([c if k == 0 else c.clone() for c, n in zip(counts, numbers, strict=True) for k in range(n)])
        for out, found in zip(lists, pieces, strict=True):
            out.extend(found)
        return has_complex


def adamw(module: nn.Module, options: AdamWOptions, *, lr: float, in_pieces: bool = False) -> torch.optim.AdamW:
    """AdamW over all parameters of `module` that are trained."""
    groups = parameter_groups(module, options.weight_decay)
    kind = AdamWInPieces if in_pieces else torch.optim.AdamW
    return kind(groups, lr=lr, betas=options.betas, eps=options.epsilon)


def parameter_groups(module: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Two parameter groups: weight decay is on matrices only, as usual, not on norms and biases."""
    params = [p for p in module.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in params if len(whole_shape(p)) >= 2], "weight_decay": weight_decay},
        {"params": [p for p in params if len(whole_shape(p)) < 2], "weight_decay": 0.0},
    ]
    return [g for g in groups if g["params"]]
