"""The section `objective.reward`: a policy gradient of a task reward, beside the divergence."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, Tag, model_validator
from pydantic_core import PydanticCustomError

from opd.config.kinds import NameOrMapping, by_kind
from opd.settings.strict import Strict


class NoBaselineConfig(Strict):
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


class WarmUpConfig(Strict):
    explained: float = Field(0.0, ge=0, lt=1)
    """The policy begins to train once the critic explains more than this share of the variance of the returns."""
    steps: int = Field(2, ge=1)
    """So many steps in a row."""
    at_most: int | None = Field(None, ge=1)
    """The run stops if the critic is not ready after so many steps; default: it goes on."""


class CriticBaseline(Strict):
    kind: Literal["critic"]
    """A second model, which begins with the student's body, learns what each state is worth, and each token's advantage is what
    it changed about that (PPO). Right for one response a prompt; it costs about as much as training the student again."""
    lr_ratio: float = Field(2.0, gt=0, allow_inf_nan=False)
    """The critic's learning rate over the trainer's; 1.5 to 5 is known to work."""
    updates: int = Field(2, ge=1)
    """Updates of the critic in each step, every one over all of its tokens."""
    gamma: float = Field(1.0, gt=0, le=1)
    """Discount of a token."""
    policy_lambda: float | None = Field(None, ge=0, le=1)
    """Lambda of the advantages; default: 1 - 1 / (1.5 l) for an episode of l trained tokens."""
    critic_lambda: float = Field(1.0, ge=0, le=1)
    """Lambda of the returns that the critic learns; 1: the outcome itself."""
    bootstrap: bool = True
    """An episode that was cut from outside, at a limit of tokens for instance, and earned nothing is worth what the critic says of
    its end. False: it earned 0; for tasks where the limit is part of the task, so that rambling on is a mistake."""
    value_clip: float | None = Field(None, gt=0)
    """Distance from its value at the start of the step from which on the critic is not drawn any further; default: none."""
    max_grad_norm: float | None = Field(None, gt=0, allow_inf_nan=False)
    """The critic's gradients are scaled down to this global norm; default: `trainer.max_grad_norm`."""
    freeze_attention: bool = False
    """Keep the critic's attention layers as they are."""
    warm_up: WarmUpConfig = WarmUpConfig()
    """How long the critic learns alone."""


KINDS = ("leave_one_out", "group", "ema", "none", "critic")

BaselineConfig = Annotated[
    Annotated[LeaveOneOutBaseline, Tag("~leave_one_out")]
    | Annotated[GroupBaseline, Tag("~group")]
    | Annotated[EmaBaseline, Tag("~ema")]
    | Annotated[NoBaselineConfig, Tag("~none")]
    | Annotated[CriticBaseline, Tag("~critic")],
    by_kind("baseline"),
    NameOrMapping("baseline", "objective.reward.baseline", KINDS),
]


class WeightSchedule(Strict):
    to: float = Field(..., ge=0)
    """The weight from step `steps` on."""
    steps: int = Field(..., ge=2)
    """The weight goes in a straight line from `weight` in the first step to `to` in this one."""


class RatioConfig(Strict):
    low: float = Field(0.3, gt=0, le=1)
    """A token is masked, and gives no gradient, unless p / mu > 1 - low: the student's probability over the engine's when it
    sampled the token, both at `rollout.temperature`."""
    high: float = Field(5.0, gt=0, allow_inf_nan=False)
    """And unless p / mu < 1 + high. Outside of the band the student is too far from what was sampled for the token to say anything."""


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
    cosine go into the metrics; 0: never. Such a step trains about twice as long, and holds three more copies of the gradient."""
    penalty: float = Field(1.0, gt=0, allow_inf_nan=False)
    """What a token counts against the student in a turn that the guard blocked, with `guard.on_hit: negative`: its advantage is
    minus this, whatever the episode earned."""
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
