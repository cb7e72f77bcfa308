"""The policy gradient of a reward, in the same pass over the head as the divergence and never inside of it.

    L = -sum_n v_n f(r_n) A_n log p(y_n),   r = p(y) / mu(y),   f(r) = r if 1 - low < r < 1 + high, else 0

p is the student, mu(y) the engine's probability of the token when it was sampled, A the token's advantage, v its weight;
A, v and f(r) carry no gradient. With d log p(y) / dz_u = [u = y] - p_u the gradient by the logits is

    dL/dz_u = -v f(r) A ([u = y] - p_u)

Inside of the band that is also the gradient of the surrogate -v A r, since dr = r d log p. Where mu is the student, r = 1 and
the mean of the gradient over responses is the exact policy gradient. Where mu is older, r makes up for the choice of y at its
state: sum_y mu(y) r A d log p(y) = sum_y p(y) A d log p(y). That other states are visited is left as it is, as in the
divergence. Outside of the band a token gives nothing. It is masked and not clipped, so no older policy has to be kept or run,
and the share of masked tokens says when mu has become too old (direct importance sampling: SAO, arXiv 2607.07508).

Shapes: C tokens of a chunk, V vocabulary rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor

    from opd.losses.objective import StudentChunk


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyGradient:
    """The band of ratios outside of which a token is masked."""

    low: float
    high: float

    def factor(self, logp_C: Tensor, behaviour_C: Tensor) -> tuple[Tensor, Tensor]:
        """f(r), and where the token is masked. A ratio that is not a number is outside of any band."""
        ratio_C = (logp_C - behaviour_C).exp()
        inside_C = (ratio_C > 1 - self.low) & (ratio_C < 1 + self.high)
        return torch.where(inside_C, ratio_C, 0.0), ~inside_C

    def add(
        self, grad_C_V: Tensor, student: StudentChunk, advantage_C: Tensor, weight_C: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Add dL/dz to the gradient of a chunk, in place; `weight_C` is v. Returns each token's -f(r) A log p, and where it is
        masked."""
        factor_C, masked_C = self.factor(student.logp_C, student.behaviour_C)
        strength_C = factor_C * advantage_C
        # chosen, not multiplied: a token without weight may have an advantage that is not a number
        step_C = torch.where(weight_C != 0, weight_C * strength_C, 0.0)
        grad_C_V.addcmul_(student.p_C_V, step_C[:, None])
        grad_C_V.scatter_add_(1, student.token_C[:, None], -step_C[:, None])
        return -strength_C * student.logp_C, masked_C
