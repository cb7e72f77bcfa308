"""The sampled-token estimate (k1) as a policy gradient, for teachers that only give the sampled token's log-prob.

    A_n = clip(log q(y_n) - log p(y_n)) - b,     w_n = p(y_n) / p_T(y_n) * clip(p_T(y_n) / mu(y_n))
    gradient = -w_n A_n d log p(y_n),            A, b and w without gradient

p is the student, p_T the student at the temperature of sampling, mu(y) the probability with which y was sampled, q the teacher. For
what the student has just written p_T / mu is 1.

Without clips w is p / mu, and the expectation of the estimate over y ~ mu is the gradient of exact reverse KL at the same state,
whatever policy mu sampled (Thinking Machines, "On-Policy Distillation", 2025). This holds as long as neither b nor the token's weight
in the loss depends on the response (see `opd.train.totals.weigh_rows`). Differentiating log p - log q itself would not do,
because the teacher would drop out. The baseline b only lowers the variance (see `opd.train.batch.leave_one_out_baselines`).

There are two clips: `ratio_clip` bounds p_T / mu, for stale samples, and `advantage_clip` bounds the log-ratio (Kimi K3, arXiv
2607.24653). Where a clip is active the estimate is biased, so the share of clipped tokens is reported.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import Field, field_validator
from pydantic_core import PydanticCustomError

from opd.config.objectives import ObjectiveConfig
from opd.losses.objective import Slope, StudentChunk

if TYPE_CHECKING:
    from opd.payloads.hidden_states import WholeChunk
    from opd.payloads.sampled_logprobs import SampledChunk


@dataclass(frozen=True, slots=True)
class SampledKL:
    """Value: log p(y) - log q(y), whose mean over samples is KL(student || teacher)."""

    mixes: ClassVar[bool] = True

    ratio_clip: float | None = None
    """Upper bound of p_T / mu; None: unbounded."""
    advantage_clip: float | None = None
    """Bound of |log q(y) - log p(y)|, nats; None: unbounded."""

    def __call__(self, student: StudentChunk, teacher: SampledChunk | WholeChunk) -> Slope:
        k1_C = student.logp_C - teacher.logq_C
        advantage_C = -k1_C if self.advantage_clip is None else (-k1_C).clamp(-self.advantage_clip, self.advantage_clip)
        clipped_C = advantage_C != -k1_C
        w_C = (student.logp_C - student.behaviour_C).exp()
        if self.ratio_clip is not None:
            aged_C = (student.sampling_C - student.behaviour_C).exp()
            within_C = aged_C <= self.ratio_clip
            # w = p / p_T * p_T / mu. The bound is on p_T / mu alone, so p / p_T stays as it is.
            w_C = w_C.where(within_C, (student.logp_C - student.sampling_C).exp() * self.ratio_clip)
            clipped_C |= ~within_C
        if teacher.baseline_C is not None:
            advantage_C = advantage_C - teacher.baseline_C
        p_slope_C_V = student.logp_C_V.new_zeros(student.logp_C_V.shape)
        # All ids but the sampled one have slope 0: through the softmax this gives -w A d log p(y).
        p_slope_C_V.scatter_(1, student.token_C[:, None], (-w_C * advantage_C)[:, None])
        return Slope(k1_C, p_slope_C_V, clipped_C)


class SampledConfig(ObjectiveConfig):
    OBJECTIVE: ClassVar[type[Any]] = SampledKL
    PAYLOADS: ClassVar[tuple[str, ...]] = ("sampled_logprobs", "hidden_states")
    IS_ESTIMATE: ClassVar[bool] = True

    kind: Literal["sampled"]
    """Policy gradient from the sampled token's log-prob."""
    normalize: Literal["token_mean"] = "token_mean"
    """Mean over the step's trained tokens, with lengths of the domain's other responses."""
    ratio_clip: float | None = Field(None, gt=0)
    """Upper bound of p / mu, how much likelier a token has become; default: none."""
    advantage_clip: float | None = Field(None, gt=0)
    """Bound of |log q - log p|, nats; default: none."""
    baseline: Literal["none", "leave_one_out"] = "none"
    """Subtract the mean of the domain's other responses; needs payload `sampled_logprobs`."""

    @field_validator("normalize", mode="before")
    @classmethod
    def _no_weight_that_depends_on_the_sample(cls, value: Any) -> Any:
        if value == "sequence_mean":
            raise PydanticCustomError(
                "biased_weight",
                "token_mean: 1 / length depends on the very tokens whose gradient it weighs, so the estimate would be "
                "biased; an exact kind such as reverse_kl may have sequence_mean",
            )
        return value

    @property
    def wants_baseline(self) -> bool:
        return self.baseline != "none"

    def problem_with(self, payload: str) -> PydanticCustomError | None:
        problem = super().problem_with(payload)
        if problem is None and self.wants_baseline and payload != "sampled_logprobs":
            return PydanticCustomError(
                "baseline",
                "teachers.payload sampled_logprobs, from which a response's mean is known before the step",
                {"where": "objective.baseline", "found": f"{self.baseline} with teachers.payload {payload}"},
            )
        return problem

    def problem_with_extrapolation(self, payload: str) -> PydanticCustomError | None:
        problem = super().problem_with_extrapolation(payload)
        if problem is None and self.advantage_clip is not None and payload == "sampled_logprobs":
            # Without the sum over the vocabulary the target is known up to a constant of each state. The gradient's mean does
            # not depend on it, but a clip would begin somewhere else at each state.
            return PydanticCustomError(
                "extrapolate",
                "1, or teachers.payload hidden_states, or no objective.advantage_clip: the clip needs a normalised target",
                {"with": "objective.advantage_clip and teachers.payload sampled_logprobs"},
            )
        return problem
