"""Generalised Jensen-Shannon divergence (Agarwal et al., GKD, arXiv 2306.13649, equation 1; beta as in TRL).

    m = beta q + (1 - beta) p
    f(p) = beta KL(q || m) + (1 - beta) KL(p || m),     f'_v = (1 - beta)(log p_v - log m_v)

It is bounded, and lies between the two KLs. With beta 0 or 1 the formula would be 0 everywhere; as in TRL, 0 means forward KL and 1
reverse KL.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import Field

from opd.config.objectives import ObjectiveConfig
from opd.losses.forward_kl import ForwardKL
from opd.losses.objective import Slope, StudentChunk
from opd.losses.reverse_kl import ReverseKL

if TYPE_CHECKING:
    from opd.payloads.hidden_states import WholeChunk


@dataclass(frozen=True, slots=True)
class JSD:
    """JSD_beta(teacher, student)."""

    mixes: ClassVar[bool] = False

    beta: float = 0.5

    def __call__(self, student: StudentChunk, teacher: WholeChunk) -> Slope:
        if self.beta in (0.0, 1.0):
            limit = ReverseKL() if self.beta == 1.0 else ForwardKL()
            return limit(student, teacher)
        logp_C_V, logq_C_V = student.logp_C_V, teacher.logq_C_V
        # In logarithms, because the probabilities of unlikely ids underflow to 0.
        logm_C_V = (logq_C_V + math.log(self.beta)).logaddexp(logp_C_V + math.log1p(-self.beta))
        p_slope_C_V = (1 - self.beta) * student.p_C_V * (logp_C_V - logm_C_V)
        value_C = self.beta * (logq_C_V.exp() * (logq_C_V - logm_C_V)).sum(-1) + p_slope_C_V.sum(-1)
        return Slope(value_C, p_slope_C_V)


class JSDConfig(ObjectiveConfig):
    OBJECTIVE: ClassVar[type[Any]] = JSD

    kind: Literal["jsd"]
    """Generalised Jensen-Shannon divergence."""
    beta: float = Field(0.5, ge=0, le=1)
    """Weight of the teacher in the mixture; 0: forward, 1: reverse KL."""
