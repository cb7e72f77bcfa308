"""The section `objective.reward`: a policy gradient of a task reward, beside the divergence."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, Tag, model_validator
from pydantic_core import PydanticCustomError

from opd.config.kinds import NameOrMapping, discriminate_by_kind
from opd.settings.strict import Strict


class NoBaselineConfig(Strict):
    kind: Literal["none"]
    """The reward itself is the advantage."""


class LeaveOneOutBaseline(Strict):
    kind: Literal["leave_one_out"]
    """Minus the mean reward of the prompt's other responses (RLOO)."""


class GroupBaseline(Strict):
    kind: Literal["group"]
    """Minus the mean reward of all the prompt's responses (GRPO); needs `rollout.n` ≥ 2."""
    divide_by_std: bool = False
    """Divide by the standard deviation of the group's rewards as well."""


class EmaBaseline(Strict):
    kind: Literal["ema"]
    """Minus a running mean of the domain's rewards."""
    decay: float = Field(0.95, ge=0, lt=1)
    """Share of the old mean that an episode leaves."""


class WarmUpConfig(Strict):
    explained: float = Field(0.0, ge=0, lt=1)
    """The policy trains once the critic explains more than this share of the returns' variance."""
    steps: int = Field(2, ge=1)
    """So many steps in a row."""
    at_most: int | None = Field(None, ge=1)
    """The run stops if the critic is not ready by then; default: it goes on."""


class CriticBaseline(Strict):
    kind: Literal["critic"]
    """A second model learns what each state is worth (PPO); costs about another training of the student."""
    lr_ratio: float = Field(2.0, gt=0, allow_inf_nan=False)
    """The critic's learning rate over the trainer's; 1.5 to 5 works."""
    updates: int = Field(2, ge=1)
    """Updates of the critic in each step."""
    gamma: float = Field(1.0, gt=0, le=1)
    """Discount of a token."""
    policy_lambda: float | None = Field(None, ge=0, le=1)
    """Lambda of the advantages; default: 1 - 1 / (1.5 l), l the episode's trained tokens."""
    critic_lambda: float = Field(1.0, ge=0, le=1)
    """Lambda of the critic's returns; 1: the outcome itself."""
    bootstrap: bool = True
    """A cut episode that earned nothing is worth the critic's value of its end. False: 0, where the limit is part of
    the task."""
    value_clip: float | None = Field(None, gt=0)
    """Most that a value is drawn from where it was at the step's start; default: no limit."""
    max_grad_norm: float | None = Field(None, gt=0, allow_inf_nan=False)
    """Default: `trainer.max_grad_norm`."""
    freeze_attention: bool = False
    """Keep the critic's attention layers as they are."""
    warm_up: WarmUpConfig = WarmUpConfig()
    """First steps: the critic learns alone."""


KINDS = ("leave_one_out", "group", "ema", "none", "critic")

BaselineConfig = Annotated[
    Annotated[LeaveOneOutBaseline, Tag("~leave_one_out")]
    | Annotated[GroupBaseline, Tag("~group")]
    | Annotated[EmaBaseline, Tag("~ema")]
    | Annotated[NoBaselineConfig, Tag("~none")]
    | Annotated[CriticBaseline, Tag("~critic")],
    discriminate_by_kind("baseline"),
    NameOrMapping("baseline", "objective.reward.baseline", KINDS),
]


class WeightSchedule(Strict):
    to: float = Field(..., ge=0)
    """The weight from step `steps` on."""
    steps: int = Field(..., ge=2)
    """The step in which `weight`, in a straight line, has become `to`."""


class RatioConfig(Strict):
    low: float = Field(0.3, gt=0, le=1)
    """A token is masked unless p / mu > 1 - low: the student's probability now over that at sampling."""
    high: float = Field(5.0, gt=0, allow_inf_nan=False)
    """And unless p / mu < 1 + high."""


class BudgetConfig(Strict):
    tokens: int | None = Field(None, ge=1)
    """Most tokens of a response, or of all turns of an episode."""
    share: float | None = Field(None, gt=0, allow_inf_nan=False)
    """The same as a share of the mean in the step and domain; beside `tokens` the larger of the two holds."""
    reward: float = Field(-1.0, allow_inf_nan=False)
    """Reward of a longer one, in place of its own."""

    @model_validator(mode="after")
    def _check_limit(self) -> BudgetConfig:
        if self.tokens is None and self.share is None:
            raise PydanticCustomError("budget", "`tokens`, `share` or both", {"found": "neither"})
        return self


class PreferenceConfig(Strict):
    """A second model, the discriminator, learns in each step to tell the student's answers from those of text-only experts."""

    controls: Literal["none", "length", "form"] = "form"
    """Properties that no answer is preferred for: its `length`, or `form`: length, lines and share of punctuation."""
    length_ratio: float = Field(2.0, ge=1, allow_inf_nan=False)
    """A response more than so many times as long or as short as the expert's answer earns 0; so does one cut where that was not."""
    lr_ratio: float = Field(0.25, gt=0, allow_inf_nan=False)
    """The discriminator's learning rate over the trainer's."""
    updates: int = Field(1, ge=1)
    """Its updates in each step."""
    warm_up: int = Field(10, ge=0)
    """Steps in which it learns alone, before it rewards."""


class RewardConfig(Strict):
    weight: float = Field(1.0, ge=0)
    """Weight of the policy gradient beside the divergence."""
    schedule: WeightSchedule | None = None
    """Changes `weight` from step to step; default: it stays."""
    baseline: BaselineConfig = LeaveOneOutBaseline(kind="leave_one_out")
    """Number to subtract from a reward to make an advantage, see docs/credit.md; a kind alone will do."""
    preference: PreferenceConfig | None = None
    """Reward the domains of text-only experts by a discriminator, see docs/text_only.md; default: as other domains."""
    ratio: RatioConfig = RatioConfig()
    """Distance that a token's probability may move before it is masked."""
    compare_every: int = Field(0, ge=0)
    """Steps between comparisons of both gradients, in norms and cosine; 0: never. Such a step trains twice as long and
    holds three more gradients."""
    penalty: float = Field(1.0, gt=0, allow_inf_nan=False)
    """With `guard.on_hit: negative`: tokens of a blocked turn have minus this as advantage."""
    budget: BudgetConfig | None = None
    """Reward responses within a number of tokens alone, see docs/efforts.md#experts; default: of any length."""
    timeout_s: float = Field(10, gt=0)
    """Deadline of a verifier for one response; late or failed ones give 0 and are counted."""

    def weight_at(self, step: int) -> float:
        """Return the weight in this step, counted from 1. It depends on the step alone, so a resume has no state to restore."""
        if self.schedule is None:
            return self.weight
        progress = min(1.0, (step - 1) / (self.schedule.steps - 1))
        return self.weight + (self.schedule.to - self.weight) * progress

    @model_validator(mode="after")
    def _check_weight(self) -> RewardConfig:
        if self.weight == 0 and (self.schedule is None or self.schedule.to == 0):
            raise PydanticCustomError(
                "reward_weight",
                "above 0, or a schedule that ends above 0; leave the section out to train without rewards",
                {"where": "objective.reward.weight", "found": "0 in every step"},
            )
        return self
