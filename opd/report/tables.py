"""The report as tables of text, for terminals and Markdown."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

from opd.report.exams import moves_label
from opd.text import format_or_dash


def domain_rows(report: Mapping[str, Any]) -> list[tuple[str, str, str, str, str]]:
    """Return a row for each domain, and a last row with the means: domain, student before, expert, merged, headroom."""
    domains = report["domains"]
    rows = [
        (n, f"{d['before']:.2f}", format_or_dash(d["expert"], ".2f"), f"{d['after']:.2f}", format_share(d["headroom"]))
        for n, d in domains.items()
    ]
    if domains:
        means = [
            format_or_dash(_mean([d[key] for d in domains.values()]), ".2f") for key in ("before", "expert", "after")
        ]
        rows.append(("mean", *means, format_share(report["mean_headroom"])))  # type: ignore[arg-type]
    return rows


def _mean(values: Sequence[float | None]) -> float | None:
    """Return the mean; None if a value is missing, as the experts' values are in a run without teachers."""
    numbers = [value for value in values if value is not None]
    return fmean(numbers) if len(numbers) == len(values) else None


def round_rows(report: Mapping[str, Any]) -> list[tuple[str, ...]]:
    """Return a row for each round: number, steps, mean gain, and mean headroom from the very first student and from the
    round's own start."""
    return [
        (
            str(r["round"]),
            str(r["steps"]),
            "-" if r["mean_gain"] is None else f"{r['mean_gain']:+.2f}",
            format_share(r["mean_headroom"]),
            format_share(r["mean_headroom_in_round"]),
        )
        for r in report.get("rounds", ())
    ]


def baseline_rows(report: Mapping[str, Any]) -> list[tuple[str, ...]]:
    """Return a row for this merge and one for each baseline; no rows if there are no baselines.

    A row has method, share of the merge's training, response tokens, seeds, mean headroom, and `stale` if out of date.
    """
    rows = report.get("baselines", ())
    merge = ("this merge", "1", f"{trained_on(report):,}", "1", format_share(report["mean_headroom"]), "")
    return [merge, *map(_baseline_row, rows)] if rows else []


def trained_on(report: Mapping[str, Any]) -> int:
    """Return how many response tokens the merge was trained on. (`response_tokens` also counts what environments wrote.)"""
    tokens: int = report["curves"]["tokens"][-1] if "curves" in report else report["response_tokens"]
    return tokens


def _baseline_row(row: Mapping[str, Any]) -> tuple[str, ...]:
    return (
        row["label"],
        "-" if row["token_share"] is None else f"{row['token_share']:g}",
        "-" if row["tokens"] is None else f"{row['tokens']:,}",
        str(row["seeds"]),
        format_share(row["mean_headroom"]),
        "stale" if row["stale"] else "",
    )


def agent_rows(report: Mapping[str, Any]) -> list[tuple[str, ...]]:
    """Return a row for each domain of agents: domain, episodes, mean turns, mean reward, share of the sampled tokens that
    carried loss, forks, lost turns, broken episodes, and the largest mean gap of a turn in nats."""
    return [(name, *_agent_row(row)) for name, row in report.get("episodes", {}).items()]


def _agent_row(row: Mapping[str, Any]) -> tuple[str, ...]:
    gaps = [turn["logprob_gap"] for turn in row["by_turn"] if turn["logprob_gap"] is not None]
    return (
        str(row["episodes"]),
        "-" if row["turns"] is None else f"{row['turns']:.1f}",
        "-" if row["reward"] is None else f"{row['reward']:.3f}",
        format_share(row["trained"]),
        str(row["forks"]),
        str(row["lost_turns"]),
        str(row["broken"]),
        f"{max(gaps):.1e}" if gaps else "-",
    )


def effort_rows(report: Mapping[str, Any]) -> list[tuple[str, ...]]:
    """Return a row for each domain and effort: both, mean tokens of an answer of student before, expert and merged, their accuracies, and
    the loss in nats where thoughts or turns end."""
    models = ("before", "expert", "after")
    return [
        (
            row["domain"],
            row["effort"],
            *(format_or_dash(row[f"{key}_tokens"], ".1f") for key in models),
            *(format_or_dash(row[key], ".2f") for key in models),
            format_or_dash(row["end_loss"], ".4f"),
        )
        for row in report.get("efforts", {}).get("rows", ())
    ]


def draft_rows(report: Mapping[str, Any]) -> list[tuple[str, ...]]:
    """Return a row for all domains and for each: tokens of a pass of the student with the draft, by the trainer in the first and the last
    steps, and by the engines."""
    keys = ("first", "last", "engine_first", "engine_last")
    return [
        (row["domain"], *(format_or_dash(row[key], ".2f") for key in keys))
        for row in report.get("draft", {}).get("rows", ())
    ]


def length_rows(report: Mapping[str, Any]) -> list[tuple[str, ...]]:
    """Return a row for each group of tasks of similar length; none if no task says its length.

    A row has the domain, the task's right moves, the number of tasks, and the success of student before, expert and merged,
    each with its 95 % interval.
    """
    return [
        (
            domain,
            moves_label(group),
            str(group["questions"]),
            *(success_text(group[key], group[f"{key}_interval"]) for key in ("before", "expert", "after")),
        )
        for domain, groups in report.get("by_length", {}).items()
        for group in groups
    ]


def success_text(value: float | None, interval: Sequence[float] | None) -> str:
    """Format a success and its interval as `0.50 (0.40 to 0.60)`; None as a dash."""
    return "-" if value is None or interval is None else f"{value:.2f} ({interval[0]:.2f} to {interval[1]:.2f})"


def markdown_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table; the first column is text, the others are numbers."""
    lines = [columns, ("---", *["---:"] * (len(columns) - 1)), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def format_share(value: float | None) -> str:
    """Format a share: 0.95 as `95 %`, None as a dash."""
    return "-" if value is None else f"{100 * value:.0f} %"
