"""Records of the policy gradient: what an optimiser step gets, what the trainer reports, and what `metrics.jsonl` keeps."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from math import sqrt
from typing import TYPE_CHECKING, Any

from opd.records.sums import Sums
from opd.records.texts import TextSpending

if TYPE_CHECKING:
    from opd.credit.interfaces import Floats


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardStep:
    """The policy gradient of one optimiser step, as the trainer gets it."""

    weight: float
    """Factor of its mean in the loss, beside the divergence's mean with factor 1."""
    advantages: Mapping[str, Floats]
    """Sample id -> [N] advantage of each trained token. A sample that is missing takes no part in the policy gradient."""
    compare: bool = False
    """Compute the two gradients one after the other, so that they can be compared."""
    waits: bool = False
    """True: the trainer takes no optimiser step, because a critic learns alone. With a divergence alone it would train on rounding
    noise, since the student still has the weights that the run began with; AdamW scales noise up to whole steps."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyStats(Sums):
    """Sums over one domain's trained tokens that have an advantage."""

    tokens: int
    loss_sum: float
    """-f(r) A log p, see `opd.losses.policy_gradient`."""
    masked: int
    """Number of tokens outside of the band of ratios."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GradientSums(Sums):
    """Sums over the parameters, or over a rank's part of them, that compare the divergence's gradient with the policy gradient."""

    divergence_sq: float
    """Sum of the squares of the divergence's gradient."""
    policy_sq: float
    """Sum of the squares of the policy gradient, with its factor in the loss."""
    dot: float
    """Sum of the products of the two."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyReport:
    """The trainer's report on the policy gradient of one step, summed over all ranks."""

    loss: float
    """Mean over the tokens that have an advantage, without its factor in the loss."""
    domains: Mapping[str, PolicyStats]
    compared: GradientSums | None = None
    """None in a step in which the gradients were not compared."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DomainReward:
    """One domain's rewards of a step."""

    episodes: int = 0
    """Episodes, or responses of a single turn, that have a reward."""
    reward: float = 0.0
    """Mean over them."""
    length_correlation: float | None = None
    """Correlation of reward and length over them, -1..1; None where one of the two is the same for all."""
    tokens: int = 0
    """Trained tokens that have an advantage."""
    loss: float = 0.0
    """Mean over these tokens, nats."""
    masked: float = 0.0
    """Share of these tokens outside of the band of ratios."""
    failed: int = 0
    """Responses whose verifier raised or was late: their reward is 0."""
    error: str = ""
    """Error that the first of these verifiers raised."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardRecord:
    """The policy gradient of one step in `metrics.jsonl`."""

    weight: float = 0.0
    """Factor of its mean in the loss; 0 while a critic learns alone."""
    loss: float = 0.0
    """The mean over all tokens that have an advantage; it is not part of the step's `loss`."""
    masked: float = 0.0
    """Share of these tokens outside of the band of ratios."""
    domains: Mapping[str, DomainReward] = field(default_factory=dict)
    credit: Mapping[str, float] = field(default_factory=dict)
    """Numbers of the baseline or the critic about the step, by name."""
    judges: Mapping[str, TextSpending] = field(default_factory=dict)
    """Domain -> what its judge's answers have taken since the run began."""
    cosine: float | None = None
    """Cosine of the gradients of divergence and reward; None where they were not compared, or one of them is 0."""
    divergence_norm: float | None = None
    policy_norm: float | None = None
    """With its weight."""

    def to_json(self) -> dict[str, Any]:
        """Return the keys that have a value; without keys of failures and judges where there were none."""
        data = asdict(self)
        data["domains"] = {
            name: {
                key: value
                for key, value in reward.items()
                if value is not None and (value or key not in ("failed", "error"))
            }
            for name, reward in data["domains"].items()
        }
        return {key: value for key, value in data.items() if value is not None and (value or key != "judges")}


def compare_gradients(sums: GradientSums | None) -> dict[str, float]:
    """Return the fields of a `RewardRecord` that compare the two gradients: norms, and the cosine if both are not 0."""
    if sums is None:
        return {}
    divergence, policy = sqrt(sums.divergence_sq), sqrt(sums.policy_sq)
    cosine = {"cosine": sums.dot / (divergence * policy)} if divergence and policy else {}
    return cosine | {"divergence_norm": divergence, "policy_norm": policy}
