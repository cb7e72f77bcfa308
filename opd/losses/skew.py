"""Skew reverse KL (Ko et al., DistiLLM, arXiv 2402.03898, section 3.1).

    m = (1 - alpha) q + alpha p
    f(p) = KL(p || m),     f'_v = log p_v - log m_v + 1 - alpha p_v / m_v

Reverse KL against a teacher into which a little of the student is mixed: log-ratios are bounded by -log alpha, so a
token that the teacher excludes cannot dominate the gradient.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import Field

from opd.config.objectives import ObjectiveConfig
from opd.losses.objective import Slope, StudentChunk

if TYPE_CHECKING:
    from opd.payloads.hidden_states import WholeChunk


@dataclass(frozen=True, slots=True)
class Skew:
    """KL(student || (1 - alpha) teacher + alpha student)."""

    mixes: ClassVar[bool] = False

    alpha: float = 0.1

    def __call__(self, student: StudentChunk, teacher: WholeChunk) -> Slope:
        logp_C_V = student.logp_C_V
        logm_C_V = (teacher.logq_C_V + math.log1p(-self.alpha)).logaddexp(logp_C_V + math.log(self.alpha))
        p_C_V, ratio_C_V = student.p_C_V, logp_C_V - logm_C_V
        # The constant 1 of f' is left out: the gradient of the softmax removes it.
        return Slope((p_C_V * ratio_C_V).sum(-1), p_C_V * (ratio_C_V - self.alpha * ratio_C_V.exp()))


class SkewConfig(ObjectiveConfig):
    OBJECTIVE: ClassVar[type[Any]] = Skew

    kind: Literal["skew"]
    """Reverse KL with a little of the student mixed into the teacher."""
    alpha: float = Field(0.1, gt=0, lt=1)
    """Share of the student in the mixture."""
