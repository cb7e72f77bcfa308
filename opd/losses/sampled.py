"""The sampled-token estimate (k1) as a policy gradient, for teachers that only give the sampled token's log-prob.

    A_n = clip(log q(y_n) - log p(y_n)) - b,     w_n = clip(p(y_n) / mu(y_n))
    gradient = -w_n A_n d log p(y_n),            A, b and w without gradient

Its expectation over y ~ mu is the gradient of exact reverse KL at the same state, whatever policy mu sampled
(Thinking Machines, "On-Policy Distillation", 2025); differentiating k1 itself would not do: the teacher would drop out. It holds as long as
neither the token's weight in the loss nor b depends on the response (see `opd.train.totals.row_weights`).
The baseline b only lowers the variance (see `opd.train.batch.leave_one_out`). Clips: `ratio_clip` on w (stale samples),
`advantage_clip` on the log-ratio (Kimi K3, arXiv 2607.24653); each makes the estimate biased where it is active, which
is why its rate is reported.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from opd.losses.objective import Slope, StudentChunk, TeacherChunk


@dataclass(frozen=True, slots=True)
class Sampled:
    """Value: log p(y) - log q(y), whose mean over samples is KL(student || teacher)."""

    mixes: ClassVar[bool] = True

    ratio_clip: float | None = None
    """Upper bound of w; None: unbounded."""
    advantage_clip: float | None = None
    """Bound of |log q(y) - log p(y)|, nats; None: unbounded."""

    def __call__(self, student: StudentChunk, teacher: TeacherChunk) -> Slope:
        assert teacher.logq_C is not None
        k1_C = student.logp_C - teacher.logq_C
        advantage_C = -k1_C if self.advantage_clip is None else (-k1_C).clamp(-self.advantage_clip, self.advantage_clip)
        ratio_C = (student.logp_C - student.behaviour_C).exp()
        w_C = ratio_C if self.ratio_clip is None else ratio_C.clamp(max=self.ratio_clip)
        clipped_C = (advantage_C != -k1_C) | (w_C != ratio_C)
        if teacher.baseline_C is not None:
            advantage_C = advantage_C - teacher.baseline_C
        p_slope_C_V = torch.zeros_like(student.logp_C_V)
        p_slope_C_V.scatter_(1, student.token_C[:, None], (-w_C * advantage_C)[:, None])
        return Slope(k1_C, p_slope_C_V, clipped_C)
