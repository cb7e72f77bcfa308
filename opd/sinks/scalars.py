"""One step's record as named numbers, the same names in every sink."""

from __future__ import annotations

from statistics import fmean

from opd.records.rewards import RewardRecord
from opd.records.step import StepRecord

STEP_KEYS = (
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


def flatten_record(record: StepRecord) -> dict[str, float]:
    """Return name -> number: `step/loss` and so on, `phase_s/PHASE`, `utilisation/ROLE`, `token_age/AGE`, `accuracy/DOMAIN`,
    and `KEY/DOMAIN` for a domain's numbers. With rewards, the names of `_flatten_reward` are added."""
    values_by_name = {f"step/{key}": float(getattr(record, key)) for key in STEP_KEYS}
    if record.indexer_loss is not None:
        values_by_name["step/indexer_loss"] = record.indexer_loss
    values_by_name["step/quarantined"] = float(sum(record.quarantined.values()))
    values_by_name |= {f"phase_s/{phase}": seconds for phase, seconds in record.phase_s.items()}
    values_by_name |= {f"utilisation/{role}": share for role, share in record.utilisation.items()}
    values_by_name |= {f"token_age/{age}": float(tokens) for age, tokens in record.token_ages.items()}
    for domain, values in record.domains.items():
        values_by_name |= {f"{key}/{domain}": float(value) for key, value in values.to_json().items()}
    values_by_name |= {f"accuracy/{domain}": value for domain, value in record.accuracy.items()}
    if record.reward is not None:
        values_by_name |= _flatten_reward(record.reward)
    if record.accuracy:
        values_by_name["step/accuracy"] = fmean(record.accuracy.values())
    return values_by_name


def _flatten_reward(record: RewardRecord) -> dict[str, float]:
    """Return `step/policy_loss` and so on, `reward/DOMAIN`, `policy_loss/DOMAIN`, `masked/DOMAIN`, and `credit/NAME`."""
    values_by_name = {
        "step/policy_loss": record.loss,
        "step/reward_weight": record.weight,
        "step/masked": record.masked,
    }
    gradient_keys = ("cosine", "divergence_norm", "policy_norm")
    values_by_name |= {f"step/{key}": value for key in gradient_keys if (value := getattr(record, key)) is not None}
    for domain, values in record.domains.items():
        values_by_name |= {f"reward/{domain}": values.reward} if values.episodes else {}
        values_by_name |= (
            {f"policy_loss/{domain}": values.loss, f"masked/{domain}": values.masked} if values.tokens else {}
        )
    return values_by_name | {f"credit/{name}": value for name, value in record.credit.items()}
