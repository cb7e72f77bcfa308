"""Reverse KL on the teacher's K likeliest tokens, with a term for all other tokens.

The plain sum of p log(p/q) over the K tokens is unstable: a student can lower it by moving probability to other tokens (verl PR
5041). Two forms do not allow that. S are the K tokens, P = sum_S p, Q = sum_S q:

    bucket:        f(p) = sum_S p_v log(p_v / q_v) + (1 - P) log((1 - P) / (1 - Q))
                   f'_v = log(p_v / q_v) in S, log((1 - P) / (1 - Q)) outside (the constant 1 dropped)
    unnormalised:  f(p) = sum_S p_v log(p_v / q_v) - p_v + q_v,   f'_v = log(p_v / q_v) in S, 0 outside
                   (generalised KL, arXiv 2606.30406, equation 5)

Both are lower bounds of the exact value. They are zero only where p = q on S, and with `bucket` also 1 - P = 1 - Q.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import Field

from opd.config.objectives import ObjectiveConfig
from opd.losses.objective import Slope, StudentChunk

if TYPE_CHECKING:
    from opd.payloads.top_k import TopKChunk

TINY = 1e-6
"""Least probability that a tail, 1 - P or 1 - Q, is taken to have. Below it, 1 minus a float32 sum of K probabilities is rounding
noise, and may be negative. Taking the teacher's tail as larger than it is can only lower the value, which stays a lower bound."""


@dataclass(frozen=True, slots=True)
class TopK:
    """KL(student || teacher) from the teacher's top tokens."""

    mixes: ClassVar[bool] = False

    k: int = 64
    tail: str = "bucket"
    """`bucket` or `unnormalised`."""

    def __call__(self, student: StudentChunk, teacher: TopKChunk) -> Slope:
        ids_C_K, logq_C_K = teacher.ids_C_K, teacher.logq_C_K
        logp_C_V = student.logp_C_V
        logp_C_K = logp_C_V.gather(1, ids_C_K)
        p_C_K, ratio_C_K = logp_C_K.exp(), logp_C_K - logq_C_K
        inside_C = (p_C_K * ratio_C_K).sum(-1)
        mass_p_C, mass_q_C = p_C_K.sum(-1), logq_C_K.exp().sum(-1)
        if self.tail == "unnormalised":
            p_slope_C_V = logp_C_V.new_zeros(logp_C_V.shape).scatter_(1, ids_C_K, p_C_K * ratio_C_K)
            value_C = inside_C - mass_p_C + mass_q_C
            return Slope(value_C, p_slope_C_V, student_mass_C=mass_p_C, teacher_mass_C=mass_q_C)
        tail_p_C, tail_q_C = (1 - mass_p_C).clamp(min=TINY), (1 - mass_q_C).clamp(min=TINY)
        tail_ratio_C = tail_p_C.log() - tail_q_C.log()
        p_slope_C_V = student.p_C_V * tail_ratio_C[:, None]
        # All ids have the tail's slope; the K tokens' own slopes overwrite it.
        p_slope_C_V.scatter_(1, ids_C_K, p_C_K * ratio_C_K)
        value_C = inside_C + tail_p_C * tail_ratio_C
        return Slope(value_C, p_slope_C_V, student_mass_C=mass_p_C, teacher_mass_C=mass_q_C)


class TopKConfig(ObjectiveConfig):
    OBJECTIVE: ClassVar[type[Any]] = TopK
    PAYLOADS: ClassVar[tuple[str, ...]] = ("top_k",)

    kind: Literal["top_k"]
    """Reverse KL on the teacher's likeliest tokens and their rest."""
    k: int = Field(64, ge=1)
    """Tokens that the teacher sends for each position."""
    tail: Literal["bucket", "unnormalised"] = "bucket"
    """One bucket for all other tokens, or a generalised KL without."""

    @property
    def top_k(self) -> int:
        return self.k
