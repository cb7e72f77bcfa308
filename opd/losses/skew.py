"""Skew reverse KL (Ko et al., DistiLLM, arXiv 2402.03898, section 3.1).

    m = (1 - alpha) q + alpha p
    f(p) = KL(p || m),     f'_v = log p_v - log m_v + 1 - alpha p_v / m_v

Reverse KL against a teacher into which a little of the student is mixed: log-ratios are bounded by -log alpha, so a
token that the teacher excludes cannot dominate the gradient.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch

from opd.losses.objective import Slope, StudentChunk, TeacherChunk


@dataclass(frozen=True, slots=True)
class Skew:
    """KL(student || (1 - alpha) teacher + alpha student)."""

    mixes: ClassVar[bool] = False

    alpha: float = 0.1

    def __call__(self, student: StudentChunk, teacher: TeacherChunk) -> Slope:
        assert teacher.logq_C_V is not None
        logp_C_V = student.logp_C_V
        logm_C_V = torch.logaddexp(teacher.logq_C_V + math.log1p(-self.alpha), logp_C_V + math.log(self.alpha))
        p_C_V, ratio_C_V = student.p_C_V, logp_C_V - logm_C_V
        return Slope((p_C_V * ratio_C_V).sum(-1), p_C_V * (ratio_C_V - self.alpha * ratio_C_V.exp()))
