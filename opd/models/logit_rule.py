"""Scale and cap that an architecture puts on the product of output head and hidden state. Needs no torch until it is applied.

Shapes: C tokens, V vocabulary rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class LogitRule:
    """An architecture's function of head times hidden state: Cohere and Granite scale it, Gemma caps it."""

    scale: float = 1.0
    softcap: float | None = None

    def apply(self, raw_C_V: Tensor) -> Tensor:
        """Return softcap * tanh(scale * raw / softcap), or scale * raw without a cap."""
        if self.scale != 1.0:
            raw_C_V = raw_C_V * self.scale
        return raw_C_V if self.softcap is None else (raw_C_V / self.softcap).tanh() * self.softcap

    def pull_back(self, grad_C_V: Tensor, logits_C_V: Tensor) -> Tensor:
        """Return the gradient by the raw products, from the gradient by the logits."""
        if self.softcap is not None:
            grad_C_V = grad_C_V * (1 - (logits_C_V / self.softcap).square())
        return grad_C_V if self.scale == 1.0 else grad_C_V * self.scale


IDENTITY = LogitRule()
