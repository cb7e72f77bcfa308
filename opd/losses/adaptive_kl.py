"""At each token, exact forward KL where the student leaves out what the teacher says, and exact reverse KL elsewhere.

    s = sum_v min(p_v, q_v)                      overlap of the two, 1 - total variation distance
    a = max(0, 1 - s / bound)                    forward KL's share, a constant of the step
    f(p) = a KL(q || p) + (1 - a) KL(p || q),    p_v f'_v = -a q_v + (1 - a) p_v (log p_v - log q_v)

The gradient of reverse KL has the factor p_v, so a student that is sure of a wrong token stays there. Forward KL's gradient does
not have this factor. The overlap is small for exactly such a student: it is the probability that the teacher accepts a token of
the student in speculative decoding (Leviathan et al., arXiv 2211.17192). With an overlap above `bound` this objective is reverse
KL and seeks a mode: a student that sits on one of five answers that the teacher finds equally likely has an overlap of 0.2. Below
`bound` the share of forward KL rises linearly to 1, so that no token jumps from one to the other. Other methods mix the two by
the gaps in head and tail (AKL, 2404.02657), by the ratio at each vocabulary id (ToDi, 2505.16297), or by the teacher's entropy
(2603.07079), which cannot tell a student that is sure and wrong from one that is right.

The share has no gradient. With one, the student could lower the loss by lowering the overlap, wherever forward KL is smaller than
reverse KL.

Several teachers count as one: their normalised product. The sum of their reverse KLs is least there, so that both parts of the
objective pull to the same place. The sum of their forward KLs is least elsewhere, at the mean of the teachers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import Field

from opd.config.objectives import ObjectiveConfig
from opd.losses.objective import Slope, StudentChunk

if TYPE_CHECKING:
    from torch import Tensor

    from opd.payloads.hidden_states import WholeChunk


@dataclass(frozen=True, slots=True)
class AdaptiveKL:
    """a KL(teacher || student) + (1 - a) KL(student || teacher), a from their overlap.

    With a mixture of teachers a KL(product || student) + (1 - a) sum_k w_k KL(student || teacher_k).
    """

    mixes: ClassVar[bool] = True

    bound: float = 0.2
    """Overlap from which on there is reverse KL alone, above 0."""

    def __call__(self, student: StudentChunk, teacher: WholeChunk) -> Slope:
        p_C_V, q_C_V = student.p_C_V, teacher.q_C_V()
        ratio_C_V = student.logp_C_V - teacher.logq_C_V
        forward_C = -(q_C_V * ratio_C_V).sum(-1)
        if teacher.is_mixture:
            # A mixture's `logq_C_V` is not normalised, but `q_C_V` is. This subtracts the log of the normaliser.
            forward_C = forward_C - teacher.logq_C_V.logsumexp(-1)
        share_C = self._forward_share(p_C_V.minimum(q_C_V).sum(-1))
        # In place: nothing below reads the ratios.
        p_slope_C_V = ratio_C_V.mul_(p_C_V)
        value_C = share_C * forward_C + (1 - share_C) * p_slope_C_V.sum(-1)
        p_slope_C_V.mul_((1 - share_C)[:, None]).addcmul_(q_C_V, share_C[:, None], value=-1.0)
        return Slope(value_C, p_slope_C_V)

    def _forward_share(self, overlap_C: Tensor) -> Tensor:
        """Return [C] the share a of forward KL."""
        return (1 - overlap_C / self.bound).clamp(min=0)


class AdaptiveKLConfig(ObjectiveConfig):
    OBJECTIVE: ClassVar[type[Any]] = AdaptiveKL

    kind: Literal["adaptive_kl"] = "adaptive_kl"
    """Forward KL where student and teacher hardly overlap, else reverse KL."""
    bound: float = Field(0.2, gt=0, le=1)
    """Overlap sum_v min(p_v, q_v) from which on there is reverse KL alone."""
