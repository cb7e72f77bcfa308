"""One step's record as named numbers, the same names in every sink."""

from __future__ import annotations

from collections.abc import Mapping
from statistics import fmean
from typing import Any

OF_THE_STEP = ("loss", "grad_norm", "lr", "logprob_gap", "probe_gap", "response_tokens", "prompt_tokens", "truncated")


def scalars(record: Mapping[str, Any]) -> dict[str, float]:
    """`step/loss` and its like, `phase_s/PHASE`, `accuracy/DOMAIN`, and `KEY/DOMAIN` for what a domain's record has."""
    found = {f"step/{key}": float(record[key]) for key in OF_THE_STEP}
    found["step/quarantined"] = float(sum(record["quarantined"].values()))
    found |= {f"phase_s/{phase}": seconds for phase, seconds in record["phase_s"].items()}
    for domain, values in record["domains"].items():
        found |= {f"{key}/{domain}": float(value) for key, value in values.items()}
    accuracy = record.get("accuracy", {})
    found |= {f"accuracy/{domain}": value for domain, value in accuracy.items()}
    if accuracy:
        found["step/accuracy"] = fmean(accuracy.values())
    return found
