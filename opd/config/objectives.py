"""The section `objective`: one class for each `kind`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag, field_validator
from pydantic_core import PydanticCustomError

from opd.config.strict import Strict


class _Objective(Strict):
    chunk: int = Field(128, ge=1)
    """Response tokens whose logits exist at one time."""
    compile: bool = False
    """Compile the elementwise part with torch.compile; without a C++ compiler it runs eagerly, with one warning."""
    normalize: Literal["token_mean", "sequence_mean"] = "token_mean"
    """Mean over the trained tokens of the whole step, or over its responses, each counted once however long."""


class ReverseKLConfig(_Objective):
    kind: Literal["reverse_kl"] = "reverse_kl"
    """Exact KL(student || teacher) over the whole vocabulary."""


class ForwardKLConfig(_Objective):
    kind: Literal["forward_kl"]
    """Exact KL(teacher || student) over the whole vocabulary."""


class JSDConfig(_Objective):
    kind: Literal["jsd"]
    """Generalised Jensen-Shannon divergence over the whole vocabulary."""
    beta: float = Field(0.5, ge=0, le=1)
    """Weight of the teacher in the mixture; 0 means forward, 1 reverse KL."""


class SkewConfig(_Objective):
    kind: Literal["skew"]
    """Reverse KL against the teacher with a little of the student mixed in."""
    alpha: float = Field(0.1, gt=0, lt=1)
    """Share of the student in the mixture."""


class SampledConfig(_Objective):
    kind: Literal["sampled"]
    """Policy gradient from the log-prob of the sampled token alone (k1)."""
    normalize: Literal["token_mean"] = "token_mean"
    """Mean over the trained tokens of the whole step, each response's own length replaced by that of the step's others of
    its domain, for it depends on the tokens that were sampled."""
    ratio_clip: float | None = Field(None, gt=0)
    """Upper bound of the importance weight p / mu; default: none."""
    advantage_clip: float | None = Field(None, gt=0)
    """Bound of |log q - log p|, nats; default: none."""
    baseline: Literal["none", "leave_one_out"] = "none"
    """Subtracted from the advantage to lower its variance: nothing, or the mean over the step's other responses of the
    same domain (needs teachers.payload sampled_logprobs)."""

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


class TopKConfig(_Objective):
    kind: Literal["top_k"]
    """Reverse KL on the teacher's likeliest tokens, the rest accounted for."""
    k: int = Field(64, ge=1)
    """Tokens the teacher sends for each position."""
    tail: Literal["bucket", "unnormalised"] = "bucket"
    """One bucket for all other tokens, or the generalised KL that needs none."""


def _objective_kind(value: Any) -> str:
    kind = value.get("kind", "reverse_kl") if isinstance(value, Mapping) else getattr(value, "kind", "reverse_kl")
    return f"~{kind}"


ObjectiveConfig = Annotated[
    Annotated[ReverseKLConfig, Tag("~reverse_kl")]
    | Annotated[ForwardKLConfig, Tag("~forward_kl")]
    | Annotated[JSDConfig, Tag("~jsd")]
    | Annotated[SkewConfig, Tag("~skew")]
    | Annotated[SampledConfig, Tag("~sampled")]
    | Annotated[TopKConfig, Tag("~top_k")],
    Discriminator(
        _objective_kind,
        custom_error_type="objective_kind",
        custom_error_message="`kind` is one of: reverse_kl, forward_kl, jsd, skew, sampled, top_k",
    ),
]

PAYLOADS_FOR = {
    "reverse_kl": ("hidden_states",),
    "forward_kl": ("hidden_states",),
    "jsd": ("hidden_states",),
    "skew": ("hidden_states",),
    "sampled": ("sampled_logprobs", "hidden_states"),
    "top_k": ("top_k",),
}
"""Payloads that hold what an objective needs; the first is the cheapest."""
