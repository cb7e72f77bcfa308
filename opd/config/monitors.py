"""The section `monitors`: the limits of each signal, and what happens when a reading reaches one."""

from __future__ import annotations

from itertools import pairwise
from typing import ClassVar

from pydantic import Field, model_validator
from pydantic_core import PydanticCustomError

from opd.settings.strict import Strict

ACTIONS = ("warn", "pause", "stop")
"""Actions of a monitor, from the mildest to the hardest."""


class SignalLimits(Strict):
    """The limits of one signal; a reading that reaches one of them counts, and null is never reached."""

    MOST: ClassVar[float | None] = None
    """The largest reading there can be."""

    over: int = Field(10, ge=1)
    """Steps that a reading is taken over."""
    warn: float | None = Field(None, gt=0)
    """From here on: a line on the display, and samples in `monitors/`."""
    pause: float | None = Field(None, gt=0)
    """Also ends the merge with a checkpoint and exit code 4; a resume goes on."""
    stop: float | None = Field(None, gt=0)
    """Also ends the merge with a checkpoint and exit code 1; a resume needs another limit."""

    @model_validator(mode="after")
    def _check_limit_order(self) -> SignalLimits:
        limits = [(action, limit) for action in ACTIONS if (limit := getattr(self, action)) is not None]
        for (mild, low), (hard, high) in pairwise(limits):
            if high < low:
                raise PydanticCustomError(
                    "limits",
                    "limits that do not fall from warn to pause to stop",
                    {"found": f"{hard} {high:g} below {mild} {low:g}"},
                )
        for action, limit in limits:
            if self.MOST is not None and limit > self.MOST:
                raise PydanticCustomError(
                    "limits",
                    "at most {most}, since it is a share; null switches a limit off",
                    {"most": f"{self.MOST:g}", "found": f"{action} {limit:g}"},
                )
        return self

    def find_reached(self, reading: float) -> tuple[str, float] | None:
        """Return the hardest action whose limit this reading reaches, and the limit."""
        for action in reversed(ACTIONS):
            limit = getattr(self, action)
            if limit is not None and reading >= limit:
                return action, limit
        return None


class RepetitionLimits(SignalLimits):
    MOST = 1.0
    over: int = Field(5, ge=1)
    """Steps that a reading is taken over."""
    warn: float | None = Field(0.35, gt=0)
    """Share of looping responses."""
    stop: float | None = Field(0.75, gt=0)
    """Also ends the merge with a checkpoint and exit code 1. On the way to long answers a student may loop for a while."""


class TruncationLimits(SignalLimits):
    MOST = 1.0
    warn: float | None = Field(0.9, gt=0)
    """Share of cut responses."""


class LengthLimits(SignalLimits):
    warn: float | None = Field(3.0, gt=0)
    """Times the expert's length."""


class EntropyLimits(SignalLimits):
    warn: float | None = Field(0.5, gt=0)
    """Nats a token."""


class DisagreementLimits(SignalLimits):
    MOST = 1.0
    over: int = Field(20, ge=1)
    """Steps that a reading is taken over."""
    warn: float | None = Field(0.9, gt=0)
    """Share of tokens."""


class DraftLimits(SignalLimits):
    over: int = Field(10, ge=1)
    """Steps that a reading is taken over."""
    warn: float | None = Field(1.25, gt=0)
    """Times the engines' tokens of a pass."""


class DraftCostLimits(SignalLimits):
    over: int = Field(1, ge=1)
    """Steps that a reading is taken over; only step 10 is measured."""
    warn: float | None = Field(1.0, gt=0)
    """Times the speed with the draft."""


class GapLimits(SignalLimits):
    over: int = Field(5, ge=1)
    """Steps that a reading is taken over."""
    warn: float | None = Field(0.8, gt=0)
    """Share of the tolerance; above all of it the run ends anyway."""


class GradNormLimits(SignalLimits):
    over: int = Field(10, ge=1)
    """Steps before the newest one whose median it is compared with."""
    warn: float | None = Field(10.0, gt=0)
    """Times the median."""


class MonitorsConfig(Strict):
    """A key for each of `opd.monitors.SIGNALS`. Readings are taken for each domain, but for the last two."""

    repetition: RepetitionLimits = RepetitionLimits()
    """Share of the responses that end at their limit in a loop."""
    truncation: TruncationLimits = TruncationLimits()
    """Share of the responses that end at their limit."""
    length: LengthLimits = LengthLimits()
    """Mean length over the expert's mean answer, or the start student's if longer."""
    entropy: EntropyLimits = EntropyLimits()
    """Nats by which the student's entropy lies below its teacher's."""
    disagreement: DisagreementLimits = DisagreementLimits()
    """Share of the student's tokens that are not its teacher's first choice."""
    draft: DraftLimits = DraftLimits()
    """Tokens of a pass by the trainer's estimate over the engines'; needs rollout.num_speculative_tokens."""
    draft_cost: DraftCostLimits = DraftCostLimits()
    """Tokens a second of the engines without the draft over those with it; needs rollout.num_speculative_tokens."""
    gap: GapLimits = GapLimits()
    """Mean difference of log-probs between engine and trainer, over `sync.tolerance`; at 1 the run ends anyway."""
    grad_norm: GradNormLimits = GradNormLimits()
    """Norm of the gradient over the median of the `over` steps before."""
