"""Reverse KL to a teacher with another tokenizer: exact where the teacher's distribution of the next token is known, a policy gradient
elsewhere.

The responses of student and teacher are cut into chunks that are the same bytes in both (`opd.vocabularies.alignment`). q(v) is the
teacher's probability that the text goes on with v, given the text before (`opd.payloads.aligned_states`). It is known at the first token
of a chunk, for all tokens but those that are longer than the teacher's; within one of the teacher's tokens it is known for the sampled
token only. B are the tokens for which q is known, P = sum_B p, Q = sum_B q, pi = p / P, rho = q / Q.

    first in its chunk, in B:   KL(pi || rho), exact
    any other token y:          A = log q(y) - log p(y) + b,  gradient = -w A d log p(y),  w = p(y) / mu(y)

b is the mean of log p - log q under pi for the first token of a chunk: then no probability leaves or enters B for want of a counterpart.
Within a chunk it is 0. All terms are 0 where p = q. If the teacher's tokens end wherever the student's do, the mean gradient over responses is
that of sum_v p_v log(p_v / q_v) at each state. Else a token that goes on with the teacher's last one counts more: in the exact part of the
responses that keep the boundary, and by itself where it takes the boundary away. An estimate without that has too large a variance to learn from.

A chunk that is not the spelling of one of the teacher's tokens counts as one choice: log q and log p are those of the chunk, for each of
its tokens. The log-probs of its other tokens are those of the engine, which are the student's at temperature 1, for fresh responses.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import Field

from opd.config.objectives import ObjectiveConfig
from opd.losses.objective import Slope, StudentChunk

if TYPE_CHECKING:
    from torch import Tensor

    from opd.payloads.aligned_states import AlignedChunk


@dataclass(frozen=True, slots=True)
class AlignedKL:
    """Value: KL of the first token of a chunk, in B; else log p - log q, in a chunk that is one choice divided among its tokens."""

    mixes: ClassVar[bool] = False

    advantage_clip: float | None = 2.0
    """Bound of |A|, nats; None: unbounded."""

    def __call__(self, student: StudentChunk, teacher: AlignedChunk) -> Slope:
        token_C = student.token_C[:, None]
        known_C_V = teacher.logq_C_V > float("-inf")
        logp_C_V = student.logp_C_V.masked_fill(~known_C_V, float("-inf"))
        logp_sum_C, logq_sum_C = logp_C_V.logsumexp(-1), _sum_where(known_C_V, teacher.logq_C_V)
        pi_C_V = (logp_C_V - logp_sum_C[:, None]).exp()
        # Outside of B both log-probs may be -inf, and their difference NaN.
        ratio_C_V = (student.logp_C_V - teacher.logq_C_V).masked_fill(~known_C_V, 0.0)
        mean_C = (pi_C_V * ratio_C_V).sum(-1)
        begins_spelt_C = teacher.first_in_chunk_C & teacher.spelt_C
        exact_C = begins_spelt_C & known_C_V.gather(1, token_C)[:, 0]
        logq_C = teacher.logq_C_V.gather(1, token_C)[:, 0].where(begins_spelt_C, teacher.logq_C)
        k1_C = student.logp_C - logq_C
        free_C = mean_C.where(teacher.first_in_chunk_C, 0.0) - k1_C
        bound = self.advantage_clip
        advantage_C = free_C if bound is None else free_C.clamp(-bound, bound)
        clipped_C = (advantage_C != free_C) & ~exact_C
        w_C = (student.logp_C - student.behaviour_C).exp()
        sampled_C = (-w_C * advantage_C).masked_fill(exact_C, 0.0)
        p_slope_C_V = (pi_C_V * (ratio_C_V - mean_C[:, None])).masked_fill(~exact_C[:, None], 0.0)
        p_slope_C_V.scatter_add_(1, token_C, sampled_C[:, None])
        kl_C = mean_C - (logp_sum_C - logq_sum_C)
        return Slope(
            kl_C.where(exact_C, k1_C / teacher.length_C.where(~teacher.spelt_C, 1.0)),
            p_slope_C_V,
            clipped_C,
            student_mass_C=logp_sum_C.exp(),
            teacher_mass_C=logq_sum_C.exp(),
        )


def _sum_where(chosen_C_V: Tensor, logprob_C_V: Tensor) -> Tensor:
    """Return [C] the log of the sum of some probabilities."""
    return logprob_C_V.masked_fill(~chosen_C_V, float("-inf")).logsumexp(-1)


class AlignedKLConfig(ObjectiveConfig):
    OBJECTIVE: ClassVar[type[Any]] = AlignedKL
    PAYLOADS: ClassVar[tuple[str, ...]] = ("aligned_states",)
    IS_ESTIMATE: ClassVar[bool] = True

    kind: Literal["aligned_kl"]
    """Reverse KL to an expert with another tokenizer, see docs/tokenizers.md."""
    normalize: Literal["token_mean"] = "token_mean"
    """Mean over the step's trained tokens, with lengths of the domain's other responses."""
    advantage_clip: float | None = Field(2.0, gt=0)
    """Bound of a sampled token's log-ratio, nats; null: none. Where the expert would never write the token the ratio is tens of nats, and
    one token would outweigh a step's others."""
