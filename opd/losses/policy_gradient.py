"""The policy gradient of a reward. It is computed in the same pass over the output head as the divergence, and added to it.

    L = -sum_n v_n f_n A_n log p(y_n),   f = p(y) / mu(y) if 1 - low < r < 1 + high, else 0,   r = p_T(y) / mu(y)

p is the student, p_T the same at the temperature of sampling, mu(y) the engine's probability of the token when it was sampled,
A the token's advantage, v its weight; A, v and f carry no gradient. With d log p(y) / dz_u = [u = y] - p_u the gradient by the
logits is

    dL/dz_u = -v f A ([u = y] - p_u)

Inside of the band that is also the gradient of the surrogate -v A p / mu, since dp = p d log p. Where mu is the student, f = 1
and the mean of the gradient over responses is the exact policy gradient. Where mu is older, or at another temperature, f corrects
for the choice of y at its state: sum_y mu(y) f A d log p(y) = sum_y p(y) A d log p(y). It does not correct for mu visiting other
states than p would; nor does the divergence.

A token whose r is outside of the band gives no gradient. It is masked and not clipped, so no older policy has to be kept or run,
and the share of masked tokens shows when mu has become too old (direct importance sampling: SAO, arXiv 2607.07508). The band is
about r, because only age changes r: for a token that the student has just written it is 1 at any temperature. A band of p / mu
would mask the likeliest token at temperatures below 1, and rare tokens above 1, however fresh they are.

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
    """The policy gradient with its band: a token with r <= 1 - low or r >= 1 + high is masked."""

    low: float
    high: float

    def ratio_factor(self, logp_C: Tensor, sampling_C: Tensor, behaviour_C: Tensor) -> tuple[Tensor, Tensor]:
        """Return [C] f, and [C] True where the token is masked. A ratio that is NaN is outside of every band."""
        aged_C = (sampling_C - behaviour_C).exp()
        inside_C = (aged_C > 1 - self.low) & (aged_C < 1 + self.high)
        return torch.where(inside_C, (logp_C - behaviour_C).exp(), 0.0), ~inside_C

    def add(
        self, grad_C_V: Tensor, student: StudentChunk, advantage_C: Tensor, weight_C: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Add dL/dz to the gradient of a chunk, in place; `weight_C` is v.

        Returns [C] -f A log p of each token, and [C] True where the token is masked.
        """
        factor_C, masked_C = self.ratio_factor(student.logp_C, student.sampling_C, student.behaviour_C)
        strength_C = factor_C * advantage_C
        # A token without weight may have the advantage NaN, and 0 * NaN is NaN; so its step is set to 0.
        step_C = torch.where(weight_C != 0, weight_C * strength_C, 0.0)
        grad_C_V.addcmul_(student.p_C_V, step_C[:, None])
        grad_C_V.scatter_add_(1, student.token_C[:, None], -step_C[:, None])
        return -strength_C * student.logp_C, masked_C
