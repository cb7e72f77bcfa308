"""The share of each domain in a merge's samples and tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from opd.records.step import StepRecord


def domain_shares(
    points: Sequence[Sequence[StepRecord]], domains: Sequence[str], of: str
) -> dict[str, list[float | None]]:
    """Return domain -> its share at each point, which is a group of steps.

    `of="sample"` is about the steps' prompts, `of="token"` about their trained tokens; if there are none, the share is None.
    Records of an older release have no prompts by domain, so their trained responses are counted instead.
    """
    counts = [
        [_count_tokens(record) if of == "token" else _count_samples(record) for record in part] for part in points
    ]
    shares: dict[str, list[float | None]] = {name: [] for name in domains}
    for part in counts:
        total = sum(sum(step_counts.values()) for step_counts in part)
        for name, values in shares.items():
            values.append(sum(step_counts.get(name, 0) for step_counts in part) / total if total else None)
    return shares


def _count_samples(record: StepRecord) -> Mapping[str, int]:
    return record.prompts or {name: stats.samples for name, stats in record.domains.items()}


def _count_tokens(record: StepRecord) -> Mapping[str, int]:
    return {name: stats.tokens for name, stats in record.domains.items()}
