"""report.json: what the merge gained, per domain. Other tools read it; its keys are a contract."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any


def headroom(before: float, after: float, expert: float) -> float | None:
    """Share of the way from the starting student to the expert: (after - before) / (expert - before).

    None where the expert is no better than the student was: there was nothing to recover.
    """
    return (after - before) / (expert - before) if expert > before else None


def build_report(
    *,
    name: str,
    before: Mapping[str, float],
    expert: Mapping[str, float],
    after: Mapping[str, float],
    records: Sequence[Mapping[str, Any]],
    wall_s: float,
    versions: Mapping[str, str],
) -> dict[str, Any]:
    """The report of a finished merge from its accuracies (0..1) and the records of `metrics.jsonl`."""
    domains = {
        domain: {
            "before": before[domain],
            "after": after[domain],
            "expert": expert[domain],
            "headroom": headroom(before[domain], after[domain], expert[domain]),
        }
        for domain in after
    }
    recovered = [d["headroom"] for d in domains.values() if d["headroom"] is not None]
    tokens = sum(record["response_tokens"] for record in records)
    phase_s: dict[str, float] = {}
    for record in records:
        for phase, seconds in record["phase_s"].items():
            phase_s[phase] = round(phase_s.get(phase, 0.0) + seconds, 3)
    busy_s = sum(phase_s.values())
    return {
        "name": name,
        "steps": len(records),
        "domains": domains,
        "mean_headroom": fmean(recovered) if recovered else None,
        "worst_headroom": min(recovered) if recovered else None,
        "wall_s": round(wall_s, 1),
        "phase_s": phase_s,
        "response_tokens": tokens,
        "response_tokens_per_s": round(tokens / busy_s, 1) if busy_s else 0.0,
        "versions": dict(versions),
    }


def table_rows(report: Mapping[str, Any]) -> list[tuple[str, str, str, str, str]]:
    """Domain, student before, expert, merged, headroom recovered: one row a domain and a last one with the means."""

    def share(value: float | None) -> str:
        return "-" if value is None else f"{100 * value:.0f} %"

    domains = report["domains"]
    rows = [
        (n, f"{d['before']:.2f}", f"{d['expert']:.2f}", f"{d['after']:.2f}", share(d["headroom"]))
        for n, d in domains.items()
    ]
    if domains:
        means = [f"{fmean(d[key] for d in domains.values()):.2f}" for key in ("before", "expert", "after")]
        rows.append(("mean", *means, share(report["mean_headroom"])))  # type: ignore[arg-type]
    return rows
