"""The chunked loss as tests call it: every number an argument of its own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from opd.interfaces import Objective
from opd.losses.blocks import Block
from opd.losses.chunked import Loss, LossHead, Tokens, TokenStats


def chunked_objective(
    objective: Objective,
    hidden: Tensor,
    head: Tensor,
    teachers: Sequence[Block],
    weight: Tensor,
    token: Tensor,
    behaviour: Tensor | None = None,
    **options: Any,
) -> tuple[Tensor, TokenStats]:
    """`options` are the fields of `Loss`; without `behaviour` log-probs when sampled are 0."""
    tokens = Tokens(token, weight, torch.zeros_like(weight) if behaviour is None else behaviour)
    value, stats = LossHead(head, Loss(objective=objective, **options))(hidden, tokens, teachers)
    return value, stats
