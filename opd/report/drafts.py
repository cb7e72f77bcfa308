"""The draft in the report: how many tokens a pass of the student writes with it, in the first steps and in the last."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean
from typing import Any

from opd.records.step import StepRecord

ALL = "all domains"
TRAINER, ENGINES = "accepted_length", "engine_accepted_length"
"""Keys of `StepRecord.draft`: the trainer's estimate, and what engines count that guess with the draft."""


def draft_report(first: Sequence[StepRecord], last: Sequence[StepRecord]) -> dict[str, Any] | None:
    """Return the report's key `draft`; None for a merge without a draft. `first`, `last`: the steps of the curves' ends.

    `rows` has a row for all domains and for each: `domain`, `first` and `last`, the trainer's estimates of the tokens of a pass, and
    `engine_first` and `engine_last`, what engines count; null where there is none. `kept`: for each guess the probability that it is kept,
    in the last steps, if all before it are the student's.
    """
    names = dict.fromkeys(key for record in (*first, *last) for key in record.draft if key.partition("/")[0] == TRAINER)
    if not names:
        return None
    rows = [
        {
            "domain": key.partition("/")[2] or ALL,
            "first": _mean(first, key),
            "last": _mean(last, key),
            "engine_first": _mean(first, key.replace(TRAINER, ENGINES)),
            "engine_last": _mean(last, key.replace(TRAINER, ENGINES)),
        }
        for key in names
    ]
    kept = [_mean(last, f"acceptance_{guess}") for guess in range(1, 17)]
    return {"rows": rows, "kept": [share for share in kept if share is not None]}


def _mean(records: Sequence[StepRecord], key: str) -> float | None:
    values = [record.draft[key] for record in records if key in record.draft]
    return fmean(values) if values else None
