"""One step's record as named numbers, the same names in every sink."""

from __future__ import annotations

from statistics import fmean

from opd.records.rewards import RewardRecord
from opd.records.step import StepRecord

OF_THE_STEP = (
    "loss",
    "grad_norm",
    "lr",
    "logprob_gap",
    "drift",
    "probe_gap",
    "response_tokens",
    "prompt_tokens",
    "truncated",
)


def scalars(record: StepRecord) -> dict[str, float]:
    """Name -> number: `step/loss` and so on, `phase_s/PHASE`, `utilisation/ROLE`, `token_age/AGE`, `accuracy/DOMAIN`, and
    `KEY/DOMAIN` for a domain's numbers; with rewards also what `_reward` says."""
    found = {f"step/{key}": float(getattr(record, key)) for key in OF_THE_STEP}
    found["step/quarantined"] = float(sum(record.quarantined.values()))
    found |= {f"phase_s/{phase}": seconds for phase, seconds in record.phase_s.items()}
    found |= {f"utilisation/{role}": share for role, share in record.utilisation.items()}
    found |= {f"token_age/{age}": float(tokens) for age, tokens in record.token_ages.items()}
    for domain, values in record.domains.items():
        found |= {f"{key}/{domain}": float(value) for key, value in values.to_json().items()}
    found |= {f"accuracy/{domain}": value for domain, value in record.accuracy.items()}
    if record.reward is not None:
        found |= _reward(record.reward)
    if record.accuracy:
        found["step/accuracy"] = fmean(record.accuracy.values())
    return found


def _reward(record: RewardRecord) -> dict[str, float]:
    """`step/policy_loss` and so on, `reward/DOMAIN`, `policy_loss/DOMAIN`, `masked/DOMAIN`, and `credit/NAME`."""
    found = {"step/policy_loss": record.loss, "step/reward_weight": record.weight, "step/masked": record.masked}
    compared = ("cosine", "divergence_norm", "policy_norm")
    found |= {f"step/{key}": value for key in compared if (value := getattr(record, key)) is not None}
    for domain, values in record.domains.items():
        found |= {f"reward/{domain}": values.reward} if values.episodes else {}
        found |= {f"policy_loss/{domain}": values.loss, f"masked/{domain}": values.masked} if values.tokens else {}
    return found | {f"credit/{name}": value for name, value in record.credit.items()}
