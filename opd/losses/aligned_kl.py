"""Reverse KL to a teacher with another tokenizer: exact among shared tokens, a policy gradient for chunks of text elsewhere.

The responses of student and teacher are cut into chunks that are the same bytes in both (`opd.vocabularies.alignment`). S are the tokens
that both vocabularies have, P = sum_S p and Q = sum_S q their probabilities, pi = p / P and r = q / Q the distributions among them.

    a chunk of one shared token:   f(p) = KL(pi || r),                       p_v f'_v = pi_v (log pi_v - log r_v - f) in S, 0 outside
    any other chunk c:             A = log q(c) - log p(c) + b,              gradient = -w A d log p(y) for each of its tokens y,
                                   b = KL(pi || r) + log P - log Q at its first token, 0 at the others;   w = p(y) / mu(y)

Let q'(v) be the teacher's probability of the bytes of v. If the teacher's tokens end wherever the student's do, the expectation over
responses is the gradient of sum_v p_v log(p_v / q'_v) at each state. Its part in S is known at every state, where its net flow into S
is cancelled by b; that it is taken only where a token of S was sampled, with probability P, divides it by P, which makes it the
gradient of KL(pi || r). The part outside of S is estimated from the sampled chunks. So probability moves between shared tokens and
others only as far as sampled text shows that the teacher finds it more or less likely: nothing is pushed to zero for want of a
counterpart. Where a chunk has several of the student's tokens, the estimate is that of a chunk as a single choice.

The log-probs of a chunk's other tokens are those of the engine. They are the student's at temperature 1, for fresh responses.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import Field

from opd.config.objectives import ObjectiveConfig
from opd.losses.objective import Slope, StudentChunk

if TYPE_CHECKING:
    from opd.payloads.aligned_states import AlignedChunk


@dataclass(frozen=True, slots=True)
class AlignedKL:
    """Value: KL(pi || r) of a chunk of one shared token; else log p(c) - log q(c), divided among the chunk's tokens."""

    mixes: ClassVar[bool] = False

    advantage_clip: float | None = None
    """Bound of |A|, nats; None: unbounded."""

    def __call__(self, student: StudentChunk, teacher: AlignedChunk) -> Slope:
        logp_C_V = student.logp_C_V.masked_fill(~teacher.shared_V, float("-inf"))
        mass_C = logp_C_V.logsumexp(-1)
        pi_C_V = (logp_C_V - mass_C[:, None]).exp()
        # Outside of S both log-probs are -inf, and their difference is NaN.
        ratio_C_V = (logp_C_V - mass_C[:, None] - teacher.logq_C_V).masked_fill(~teacher.shared_V, 0.0)
        kl_C = (pi_C_V * ratio_C_V).sum(-1)
        k1_C = student.logp_C - teacher.logq_C
        free_C = (kl_C + mass_C - teacher.shared_logprob_C).where(teacher.first_in_chunk_C, 0.0) - k1_C
        bound = self.advantage_clip
        advantage_C = free_C if bound is None else free_C.clamp(-bound, bound)
        clipped_C = (advantage_C != free_C) & ~teacher.single_C
        w_C = (student.logp_C - student.behaviour_C).exp()
        sampled_C = (-w_C * advantage_C).masked_fill(teacher.single_C, 0.0)
        p_slope_C_V = (pi_C_V * (ratio_C_V - kl_C[:, None])).masked_fill(~teacher.single_C[:, None], 0.0)
        p_slope_C_V.scatter_add_(1, student.token_C[:, None], sampled_C[:, None])
        value_C = kl_C.where(teacher.single_C, k1_C / teacher.length_C)
        return Slope(
            value_C,
            p_slope_C_V,
            clipped_C,
            student_mass_C=mass_C.exp(),
            teacher_mass_C=teacher.shared_logprob_C.exp(),
        )


class AlignedKLConfig(ObjectiveConfig):
    OBJECTIVE: ClassVar[type[Any]] = AlignedKL
    PAYLOADS: ClassVar[tuple[str, ...]] = ("aligned_states",)
    IS_ESTIMATE: ClassVar[bool] = True

    kind: Literal["aligned_kl"]
    """Reverse KL to an expert with another tokenizer, see docs/tokenizers.md."""
    normalize: Literal["token_mean"] = "token_mean"
    """Mean over the step's trained tokens, with lengths of the domain's other responses."""
    advantage_clip: float | None = Field(None, gt=0)
    """Bound of a chunk's log-ratio, nats; default: none."""
