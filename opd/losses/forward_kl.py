"""Exact forward KL over the whole vocabulary.

    f(p) = KL(q || p) = sum_v q_v (log q_v - log p_v),     p_v f'_v = -q_v

It covers modes: the student keeps some probability wherever the teacher has any. Its gradient is dL/dz = p - q, that of the
cross-entropy against the teacher (Hinton et al., arXiv 1503.02531).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from opd.config.objectives import ObjectiveConfig
from opd.losses.objective import Slope, StudentChunk

if TYPE_CHECKING:
    from opd.payloads.hidden_states import WholeChunk


@dataclass(frozen=True, slots=True)
class ForwardKL:
    """KL(teacher || student)."""

    mixes: ClassVar[bool] = False

    def __call__(self, student: StudentChunk, teacher: WholeChunk) -> Slope:
        q_C_V = teacher.logq_C_V.exp()
        return Slope((q_C_V * (teacher.logq_C_V - student.logp_C_V)).sum(-1), -q_C_V)


class ForwardKLConfig(ObjectiveConfig):
    OBJECTIVE: ClassVar[type[Any]] = ForwardKL

    kind: Literal["forward_kl"]
    """Exact KL(teacher || student)."""
