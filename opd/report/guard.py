"""The guard in the report of a merge: blocked turns over the steps, and for each rule what it found and what followed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from opd.records.episodes import EpisodesRecord
from opd.records.guard import RuleRecord
from opd.records.step import StepRecord


def guard_report(points: Sequence[Sequence[StepRecord]]) -> dict[str, Any] | None:
    """Return the report's key `guard`; None if no guard was on. `points`: groups of a merge's steps, one for each point of a
    curve.

    `domains` has the number of episodes, checked calls, and turns with something blocked. `rules` has a row for each domain
    and rule, with hits, blocked calls, who decided, and examples. `course` has the blocked turns per episode at each point.
    """
    records = [record for part in points for record in part]
    names = dict.fromkeys(n for record in records for n, episodes in record.episodes.items() if episodes.guard)
    if not names:
        return None
    by_domain = {name: _guard_records(records, name) for name in names}
    return {
        "domains": {name: _sum_records(episodes) for name, episodes in by_domain.items()},
        "rules": [row for name, episodes in by_domain.items() for row in _rule_rows(name, episodes)],
        "course": {
            "step": [part[-1].step for part in points],
            "blocked": {name: [_blocked_per_episode(_guard_records(part, name)) for part in points] for name in names},
        },
    }


def _guard_records(records: Sequence[StepRecord], domain: str) -> list[EpisodesRecord]:
    return [record.episodes[domain] for record in records if domain in record.episodes]


def _sum_records(records: Sequence[EpisodesRecord]) -> dict[str, int]:
    guards = [record.guard for record in records if record.guard]
    return {
        "episodes": sum(record.episodes for record in records),
        "checked": sum(guard.checked for guard in guards),
        "blocked_turns": sum(guard.blocked_turns for guard in guards),
    }


def _blocked_per_episode(records: Sequence[EpisodesRecord]) -> float | None:
    sums = _sum_records(records)
    return sums["blocked_turns"] / sums["episodes"] if sums["episodes"] else None


def _rule_rows(domain: str, records: Sequence[EpisodesRecord]) -> list[dict[str, Any]]:
    """Return a row for each rule, the one with most hits first."""
    rules: dict[str, RuleRecord] = {}
    for record in records:
        for name, rule in record.guard.rules.items() if record.guard else ():
            rules[name] = rules.get(name, RuleRecord()) + rule
    rows = [{"domain": domain, "rule": name, **asdict(rule)} for name, rule in rules.items()]
    return sorted(rows, key=lambda row: -row["hits"])
