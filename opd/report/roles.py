"""Utilisation of the roles in a merge, and the age of the tokens that it trained on."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from opd.records.step import StepRecord


def measure_utilisation(records: Sequence[StepRecord]) -> dict[str, float]:
    """Return role -> share of the steps' time in which it was at work. Steps of releases that did not measure it are left out."""
    timed_records = [record for record in records if record.busy_s]
    seconds = sum(record.seconds for record in timed_records)
    roles = dict.fromkeys(role for record in timed_records for role in record.busy_s)
    return {role: sum(r.busy_s.get(role, 0.0) for r in timed_records) / seconds for role in roles} if seconds else {}


def token_ages(records: Sequence[StepRecord]) -> dict[str, int]:
    """Return age -> trained tokens of that age in the whole merge. An age is the number of weight pushes since sampling."""
    total = Counter[str]()
    for record in records:
        total.update(record.token_ages)
    return dict(sorted(total.items(), key=lambda item: int(item[0])))
