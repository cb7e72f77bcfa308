"""Exact reverse KL over the whole vocabulary.

    f(p) = KL(p || q) = sum_v p_v (log p_v - log q_v),     f'_v = log p_v - log q_v + 1

It seeks modes: the student gives up what the teacher would not say. It is taken at fixed states, as in DeepSeek-V4 (arXiv
2606.19348, section 5.1.2). The constant 1 of f' is left out: the gradient of the softmax removes it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from opd.config.objectives import ObjectiveConfig
from opd.losses.objective import Slope, StudentChunk

if TYPE_CHECKING:
    from opd.payloads.hidden_states import WholeChunk


@dataclass(frozen=True, slots=True)
class ReverseKL:
    """KL(student || teacher); with a mixture of teachers sum_k w_k KL(student || teacher_k)."""

    mixes: ClassVar[bool] = True

    def __call__(self, student: StudentChunk, teacher: WholeChunk) -> Slope:
        p_slope_C_V = (student.logp_C_V - teacher.logq_C_V).mul_(student.p_C_V)
        return Slope(p_slope_C_V.sum(-1), p_slope_C_V)


class ReverseKLConfig(ObjectiveConfig):
    OBJECTIVE: ClassVar[type[Any]] = ReverseKL

    kind: Literal["reverse_kl"]
    """Exact KL(student || teacher)."""
