"""The scale and the cap that an architecture puts on the product of output head and hidden state. Importing this needs no torch.

Shapes: C tokens, V vocabulary rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class LogitRule:
    """The function by which an architecture makes logits from head times hidden state: Cohere and Granite scale, Gemma caps."""

    scale: float = 1.0
    """Factor of the product."""
    softcap: float | None = None
    """Bound of a logit's absolute value, reached smoothly; None: no bound."""

    def apply(self, raw_C_V: Tensor) -> Tensor:
        """Return softcap * tanh(scale * raw / softcap), or scale * raw without a cap."""
        if self.scale != 1.0:
            raw_C_V = raw_C_V * self.scale
        return raw_C_V if self.softcap is None else (raw_C_V / self.softcap).tanh() * self.softcap

    def pull_back(self, grad_C_V: Tensor, logits_C_V: Tensor) -> Tensor:
        """Return the gradient by the raw products, given the gradient by the logits; `logits_C_V` is read only with a cap."""
        if self.softcap is not None:
            grad_C_V = grad_C_V * (1 - (logits_C_V / self.softcap).square())
        return grad_C_V if self.scale == 1.0 else grad_C_V * self.scale


IDENTITY = LogitRule()
