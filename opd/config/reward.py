"""The section `objective.reward`: a policy gradient of a task reward, beside the divergence."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, GetCoreSchemaHandler, GetJsonSchemaHandler, Tag, model_validator
from pydantic_core import CoreSchema, PydanticCustomError, core_schema

from opd.config.strict import Strict


class NoBaseline(Strict):
    kind: Literal["none"]
    """The reward itself is the advantage: right in the mean, with the most noise."""


class LeaveOneOutBaseline(Strict):
    kind: Literal["leave_one_out"]
    """The mean reward of the other responses to the same prompt (`rollout.n`); for a prompt that was tried once, of the
    step's other episodes of its domain."""


class GroupBaseline(Strict):
    kind: Literal["group"]
    """The mean reward of all responses to the same prompt, the response itself among them (GRPO); needs `rollout.n` of 2 or
    more."""
    divide_by_std: bool = False
    """Divide by the standard deviation of the group's rewards as well."""


class EmaBaseline(Strict):
    kind: Literal["ema"]
    """A running mean of the domain's rewards in the steps before: for one response a prompt."""
    decay: float = Field(0.95, ge=0, lt=1)
    """What an episode leaves of the mean before it."""


KINDS = ("leave_one_out", "group", "ema", "none")


class _NameOrMapping:
    """Reads a name alone as the kind with its defaults, so that a pipeline, once read, has one form only."""

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_before_validator_function(_section, handler(source))

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        return {"oneOf": [{"enum": list(KINDS), "type": "string"}, *handler(schema)["oneOf"]]}


def _section(value: Any) -> Any:
    """Read a name as a mapping. Raises: PydanticCustomError for an unknown kind, with the nearest known one."""
    if isinstance(value, str):
        value = {"kind": value}
    if isinstance(value, Mapping) and value.get("kind") not in KINDS:
        kind = value.get("kind")
        near = difflib.get_close_matches(str(kind), KINDS, n=1)
        raise PydanticCustomError(
            "baseline",
            "{hint}one of: {kinds}",
            {
                "hint": f"did you mean `{near[0]}`? " if near else "",
                "kinds": ", ".join(KINDS),
                "where": "objective.reward.baseline",
                "found": "no `kind`" if kind is None else str(kind),
            },
        )
    return value


def _kind(value: Any) -> str:
    return f"~{value.get('kind') if isinstance(value, Mapping) else getattr(value, 'kind', '')}"


BaselineConfig = Annotated[
    Annotated[LeaveOneOutBaseline, Tag("~leave_one_out")]
    | Annotated[GroupBaseline, Tag("~group")]
    | Annotated[EmaBaseline, Tag("~ema")]
    | Annotated[NoBaseline, Tag("~none")],
    Discriminator(
        _kind, custom_error_type="baseline", custom_error_message="a kind, or a mapping with `kind` and options"
    ),
    _NameOrMapping(),
]


class WeightSchedule(Strict):
    to: float = Field(..., ge=0)
    """The weight from step `steps` on."""
    steps: int = Field(..., ge=2)
    """The weight goes in a straight line from `weight` in the first step to `to` in this one."""


class RatioConfig(Strict):
    low: float = Field(0.3, gt=0, le=1)
    high: float = Field(5.0, gt=0)
    """A token gives a gradient only while 1 - low < p / mu < 1 + high, the student's probability over the engine's: else it is
    masked. Outside of the band the token is too far from what was sampled to say anything."""


class RewardConfig(Strict):
    weight: float = Field(1.0, ge=0)
    """What the policy gradient counts beside the divergence, each of them a mean over its own trained tokens. Without
    `schedule` the same in every step."""
    schedule: WeightSchedule | None = None
    """Changes `weight` from step to step; default: it stays."""
    baseline: BaselineConfig = LeaveOneOutBaseline(kind="leave_one_out")
    """What is taken off a reward to make an advantage; a kind alone will do."""
    ratio: RatioConfig = RatioConfig()
    """How far the student may be from the engine's policy at a token."""
    compare_every: int = Field(0, ge=0)
    """Every so many steps the gradients of divergence and reward are computed one after the other, and their norms and their
    cosine go into the metrics; 0: never. Such a step trains about twice as long, and needs a second gradient's memory."""
    timeout_s: float = Field(10, gt=0)
    """Deadline of a verifier for one response. A verifier that is late or raises gives 0, and is counted."""

    def weight_at(self, step: int) -> float:
        """The weight in this step, from 1: a function of nothing else, so that a resume has no state to restore."""
        if self.schedule is None:
            return self.weight
        done = min(1.0, (step - 1) / (self.schedule.steps - 1))
        return self.weight + (self.schedule.to - self.weight) * done

    @model_validator(mode="after")
    def _weighs_something(self) -> RewardConfig:
        if self.weight == 0 and (self.schedule is None or self.schedule.to == 0):
            raise PydanticCustomError(
                "reward_weight",
                "above 0, or a schedule that ends above 0; leave the section out to train without rewards",
                {"where": "objective.reward.weight", "found": "0 in every step"},
            )
        return self
