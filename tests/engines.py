"""Stand-in for DeepSpeed's engine in a test."""

from __future__ import annotations

import torch


class Still:
    """An engine on one rank that keeps gradients in the module, and never takes its step."""

    def set_gradient_accumulation_boundary(self, last: bool) -> None: ...

    def backward(self, loss: torch.Tensor) -> None:
        loss.backward()

    def step(self) -> None: ...

    def get_global_grad_norm(self) -> float:
        return 1.0
