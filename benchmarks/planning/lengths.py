"""The lengths of a merge as `opd plan` wants them told: from the merge's own records."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

QUANTILES = 199


def lengths_of(records: Sequence[Mapping[str, Any]], limit: int) -> dict[str, float]:
    """Prompt, median and tail of the lognormal lengths, cut at the limit, that have a merge's own mean and median."""
    rows = sum(sum(record["prompts"].values()) for record in records)
    mean = sum(record["response_tokens"] for record in records) / rows
    prompt = sum(record["prompt_tokens"] for record in records) / rows
    if sum(record["truncated"] for record in records) >= rows / 2:
        return {"prompt": round(prompt), "response": float(limit), "tail": 1.0}
    median = min(_median(records, rows), mean)
    low, high = 0.0, 4.0
    for _ in range(40):
        sigma = (low + high) / 2
        low, high = (sigma, high) if _mean(median, sigma, limit) < mean else (low, sigma)
    return {"prompt": round(prompt), "response": round(median, 2), "tail": round(math.exp(2.3263 * low), 2)}


def _median(records: Sequence[Mapping[str, Any]], rows: int) -> float:
    """Tokens that half of the responses reach, between the places that records count."""
    before, place = 1.0, 0.0
    counts: dict[str, int] = {}
    for record in records:
        for name, found in record["positions"].items():
            counts[name] = counts.get(name, 0) + found["tokens"]
    for name in sorted(counts, key=lambda one: int(one.split("-")[0])):
        first, _, last = name.partition("-")
        middle = (int(first) + int(last or first)) / 2 + 1
        there = counts[name] / rows / (int(last or first) - int(first) + 1)
        if there < 0.5:
            return place + (middle - place) * (before - 0.5) / (before - there)
        before, place = there, middle
    return place


def _mean(median: float, sigma: float, limit: int) -> float:
    normal = statistics.NormalDist()
    quantiles = (normal.inv_cdf((i + 1) / (QUANTILES + 1)) for i in range(QUANTILES))
    return statistics.fmean(min(limit, max(1, round(median * math.exp(sigma * z)))) for z in quantiles)
