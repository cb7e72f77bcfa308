"""Efforts in the report: length, accuracy and the loss at the end of thoughts, and whether more effort writes more and is no worse."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from opd.records.scores import DomainScore, Evaluation
from opd.records.step import StepRecord, compute_end_loss, select_domain
from opd.report.exams import latest_exam
from opd.report.intervals import Estimate, is_clear
from opd.report.run import RunFiles

if TYPE_CHECKING:  # it imports matplotlib, which report.json does not need
    from opd.report.drawing import Plot


def effort_report(run: RunFiles, last_steps: Sequence[StepRecord]) -> dict[str, Any] | None:
    """Return the report's key `efforts`; None for a pipeline without efforts. `last_steps`: the steps of the curves' last point.

    `rows` has a row for each domain and effort, in the order of the pipeline: `domain`, `effort`, `name` of the domain that has both;
    for `before`, `after` and `expert` the accuracy and `..._tokens`, the mean length of an answer; `end_loss`, the loss in nats at the
    tokens that end thoughts or turns. Numbers that are not known are null. `falls` has a sentence for each effort whose answers are
    shorter than those of the effort below it, or less often right.
    """
    domains: Mapping[str, Any] = run.pipeline.get("domains", {})
    exams = {"before": run.before, "after": latest_exam(run), "expert": run.expert}
    rows = [
        _describe_effort(name, settings["effort"], exams, last_steps)
        for name, settings in domains.items()
        if settings and settings.get("effort")
    ]
    return {"rows": rows, "falls": _list_falls(rows, exams["after"])} if rows else None


def _describe_effort(
    name: str, effort: str, exams: Mapping[str, Evaluation | None], last_steps: Sequence[StepRecord]
) -> dict[str, Any]:
    row: dict[str, Any] = {"domain": name.removesuffix(f"-{effort}"), "effort": effort, "name": name}
    for key, exam in exams.items():
        score = exam.scores.get(name) if exam else None
        row |= {key: score.accuracy if score else None, f"{key}_tokens": score.mean_tokens if score else None}
    return row | {"end_loss": compute_end_loss(select_domain(last_steps, name))}


def _list_falls(rows: Sequence[Mapping[str, Any]], merged: Evaluation | None) -> list[str]:
    """Return the sentences of `effort_report` about the merged model's exam, between neighbouring efforts of a domain."""
    if merged is None:
        return []
    falls = []
    for less, more in pairwise(row for row in rows if row["name"] in merged.scores):
        if less["domain"] != more["domain"]:
            continue
        pair = f"{more['domain']}: {more['effort']}"
        if more["after_tokens"] < less["after_tokens"]:
            lengths = f"{more['after_tokens']:.1f} tokens, {less['effort']} {less['after_tokens']:.1f}"
            falls.append(f"{pair} writes {lengths}")
        if more["after"] < less["after"]:
            known = (
                "beyond chance"
                if _is_better(merged.scores[less["name"]], merged.scores[more["name"]])
                else "perhaps by chance"
            )
            falls.append(f"{pair} is right in {more['after']:.3f}, {less['effort']} in {less['after']:.3f}, {known}")
    return falls


def _is_better(one: DomainScore, other: DomainScore) -> bool:
    """Return True if the first score is above the second beyond chance."""
    low, high = (Estimate(score.accuracy, score.low, score.high) for score in (other, one))
    return is_clear(low, high)


def end_loss_curves(points: Sequence[Sequence[StepRecord]], domains: Sequence[str]) -> dict[str, Any]:
    """Return the curve `end_loss` by domain; nothing for runs without efforts. `points`: groups of steps."""
    curves = {name: [compute_end_loss(select_domain(part, name)) for part in points] for name in domains}
    known = {name: curve for name, curve in curves.items() if any(value is not None for value in curve)}
    return {"end_loss": known} if known else {}


def end_loss_plots(curves: Mapping[str, Any], names: Sequence[str]) -> list[Plot]:
    """Plot the loss at the ends of thoughts or turns, if the curves have it. `names`: domains in the order of their colours."""
    from opd.report import figures

    if "end_loss" not in curves:
        return []
    by_name = {name: curves["end_loss"].get(name, [None] * len(curves["step"])) for name in names}
    title = "Loss where thoughts or turns end"
    return [figures.draw_by_domain("end-loss", title, curves, by_name, log=True, label="nats a token")]
