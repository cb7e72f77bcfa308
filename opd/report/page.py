"""Render report.html: one file that needs no network. Invisible characters are spelled out, then the template escapes all text."""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Mapping, Sequence
from functools import cache
from importlib.resources import files
from typing import Any

from jinja2 import Environment, FunctionLoader, StrictUndefined, Template

from opd.evaluation.evaluator import MERGED
from opd.records.scores import ScoredAnswer
from opd.records.sums import mean_or_none
from opd.report import figures
from opd.report.agents import LEVELS, agent_plots, shown_episodes
from opd.report.drawing import DASHES, SERIES, Plot, format_thousands
from opd.report.efforts import end_loss_plots
from opd.report.exams import agent_exams, latest_exam, moves_label
from opd.report.indexers import indexer_plots
from opd.report.rewards import reward_plots
from opd.report.run import RunFiles
from opd.report.stale import explain_stale_matrix
from opd.report.tables import trained_on

SAMPLES_PER_DOMAIN = 4
MOST_SAMPLES = 200
LONGEST_TEXT = 1500
"""Most characters of a prompt or an answer. With the two limits above the page stays well below 5 MB."""
OPTIONAL = (  # keys that a report may lack
    "alarms",
    "gate",
    "answers",
    "baselines",
    "by_length",
    "mean_headroom_interval",
    "command",
    "curves",
    "draft",
    "efforts",
    "guard",
    "lineage",
    "objectives",
    "episodes",
    "rounds",
    "stale",
    "unfinished",
)
# Keys that a domain of a report may lack.
INTERVALS = tuple(f"{key}_interval" for key in ("before", "after", "expert", "headroom", "regression"))

INVISIBLE = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200b-\u200f\u2028-\u202e\u2060-\u2069\ufeff\ud800-\udfff]")
"""Control characters except tab and line feed, marks that change the direction of text, and lone surrogates."""


def show_control_characters(text: object) -> str:
    """Spell out the characters of `INVISIBLE`, as `\\x1b`: they can hide or reorder text on the page, or are no text at all."""
    return INVISIBLE.sub(lambda match: ascii(match[0])[1:-1], str(text))


def shorten_text(text: str, limit: int = LONGEST_TEXT) -> str:
    """Return `text`; if it has more characters than `limit`, its beginning and how many are missing."""
    return text if len(text) <= limit else f"{text[:limit]} … ({len(text) - limit:,} more characters)"


def format_percent(value: float | None) -> str:
    """Format a share: 0.948 as `94.8 %`, None as a dash."""
    return "–" if value is None else f"{100 * value:.1f} %"


def percent_interval(interval: Sequence[float] | None) -> str:
    """Format an interval of shares: [0.9, 0.99] as `90.0 to 99.0 %`, None as a dash."""
    return "–" if interval is None else f"{100 * interval[0]:.1f} to {100 * interval[1]:.1f} %"


def format_duration(seconds: float) -> str:
    """Format seconds: 312.7 as `5 min 13 s`."""
    rounded = round(seconds)
    if rounded < 60:
        return f"{seconds:.1f} s"
    minutes, seconds_part = divmod(rounded, 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {seconds_part} s"


@cache
def _load_template() -> Template:
    """Return the page's template, compiled once: that takes half a second."""
    environment = Environment(
        loader=FunctionLoader(lambda name: _read_own_file(f"{name}.html.jinja")),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=lambda value: (
            show_control_characters(value) if isinstance(value, str) and not hasattr(value, "__html__") else value
        ),
    )
    environment.filters |= {
        "percent": format_percent,
        "interval": percent_interval,
        "duration": format_duration,
        "moves": moves_label,
        "shortened": shorten_text,
        "thousands": format_thousands,
    }
    return environment.get_template("page")


def render_page(report: Mapping[str, Any], run: RunFiles) -> str:
    """Return the HTML page of a report, which was made from the files of `run`."""
    script = _read_own_file("page.js")
    complete = _with_gaps(report)
    episodes, left_out = shown_episodes(run)
    return _load_template().render(
        report=complete,
        run=run,
        style=_read_own_file("page.css"),
        script=script,
        script_hash=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
        worst=_extreme_domain(complete, "headroom", min),
        most_lost=_extreme_domain(complete, "regression", max),
        domains=_domain_keys(report),
        plots=_section_plots(report, run),
        baselines=[{**b, "name": baseline_name(b)} for b in report.get("baselines", ())],
        samples=_sample_answers(run),
        cached=_cached_exam_notes(run),
        agent_exams=agent_exams(run),
        experts=_expert_rows(run, report),
        episodes=episodes,
        left_out=left_out,
        bounds=LEVELS,
    )


def _read_own_file(name: str) -> str:
    """Return a file that lies beside this module."""
    return files("opd.report").joinpath(name).read_text(encoding="utf-8")


def _cached_exam_notes(run: RunFiles) -> list[str]:
    """Return a sentence for each other run from which results of exams were taken over: the student's before, the experts'."""
    domains: dict[tuple[str, str], list[str]] = {}
    for exam in filter(None, (run.before, run.expert)):
        for domain, source in exam.cached.items():
            domains.setdefault((exam.model, source), []).append(domain)
    return [
        f"Exam of the {model} on {', '.join(names)}: cached from {source}" for (model, source), names in domains.items()
    ]


def _with_gaps(report: Mapping[str, Any]) -> dict[str, Any]:
    """Return the report with None for every missing number, because the template refuses unknown names."""
    domains = {name: {**dict.fromkeys(INTERVALS), **d} for name, d in report["domains"].items()}
    return {**dict.fromkeys(OPTIONAL), **report, "domains": domains, "trained_on": trained_on(report)}


def _extreme_domain(report: Mapping[str, Any], key: str, choose: Any) -> tuple[str, Mapping[str, Any]] | None:
    """Return the name and numbers of the domain with the smallest or largest `key`."""
    candidates = {name: d for name, d in report["domains"].items() if d[key] is not None}
    return choose(candidates.items(), key=lambda item: item[1][key]) if candidates else None


def _curve_domains(report: Mapping[str, Any]) -> list[str]:
    """Return the domains in the order that all plots use. A domain's place in it decides its colour."""
    names = set(report.get("curves", {}).get("loss", {}))
    for point in report.get("evaluations", ()):
        names |= set(point["accuracy"])
    return [*(d for d in report["domains"] if d in names), *sorted(names - set(report["domains"]))]


def _domain_keys(report: Mapping[str, Any]) -> list[dict[str, Any]]:
    return [
        {"name": name, "index": index, "colour": f"s{index % SERIES}", "dashed": DASHES[index // SERIES % 4] != "-"}
        for index, name in enumerate(_curve_domains(report))
    ]


def _section_plots(report: Mapping[str, Any], run: RunFiles) -> dict[str, list[Plot]]:
    """Return section of the page -> its plots."""
    gate = report.get("gate", {}).get("min_headroom")
    gains = []
    if report["domains"]:
        gains.append(figures.draw_accuracies(report["domains"]))
        if report["mean_headroom"] is not None:
            gains.append(figures.draw_headrooms(report["domains"], gate))
    return {
        "gains": gains,
        "rounds": _rounds_plot(report),
        "learning": [*_evaluation_plots(report), *_curve_plots(report)],
        "agents": agent_plots(report, _curve_domains(report)),
        "time": _time_plots(report),
        "matrix": [_matrix_plot(run)] if run.matrix else [],
        "baselines": _baseline_plots(report),
        "guard": _guard_plot(report),
        "by_length": _length_plots(report),
    }


def _length_plots(report: Mapping[str, Any]) -> list[Plot]:
    """Plot success against the length of the task, for each domain that has tasks of more than one length."""
    return [
        figures.draw_by_length(f"by-length-{number}", show_control_characters(domain), groups)
        for number, (domain, groups) in enumerate(report.get("by_length", {}).items())
        if len(groups) > 1
    ]


def _guard_plot(report: Mapping[str, Any]) -> list[Plot]:
    if "guard" not in report:
        return []
    step, blocked_turns = report["guard"]["course"]["step"], report["guard"]["course"]["blocked"]
    reached = dict(zip(report["curves"]["step"], report["curves"]["tokens"], strict=True))
    curves = {name: blocked_turns.get(name, [None] * len(step)) for name in _curve_domains(report)}
    axis = {"step": step, "tokens": [reached[step_number] for step_number in step]}
    title = "Turns of an episode in which the guard blocked something"
    return [figures.draw_by_domain("guard-course", title, axis, curves, label="turns")]


def _rounds_plot(report: Mapping[str, Any]) -> list[Plot]:
    finished = [r for r in report.get("rounds", ()) if r["finished"]]
    if all(r["mean_headroom"] is None for r in finished):
        return []
    curves = {name: [r["domains"].get(name, {}).get("headroom") for r in finished] for name in _curve_domains(report)}
    return [figures.draw_rounds([r["mean_headroom"] for r in finished], curves)]


def _evaluation_plots(report: Mapping[str, Any]) -> list[Plot]:
    points = report.get("evaluations", [])
    if len(points) < 2:
        return []
    axis = {key: [p[key] for p in points] for key in ("step", "tokens")}
    curves = {d: [p["accuracy"].get(d) for p in points] for d in _curve_domains(report)}
    title = "Right answers on held-out prompts"
    plots = [figures.draw_by_domain("accuracy-curve", title, axis, curves, percent=True, markers=True)]
    if any(p["mean_headroom"] is not None for p in points):
        options: dict[str, Any] = {"percent": True, "markers": True}
        if any(p.get("mean_headroom_interval") for p in points):
            ends = [p.get("mean_headroom_interval") or (p["mean_headroom"],) * 2 for p in points]
            options |= {"band": ([e[0] for e in ends], [e[1] for e in ends]), "note": "The band is the 95 % interval."}
        curve = {"mean headroom": ("merged", [p["mean_headroom"] for p in points])}
        plots.append(figures.draw_lines("headroom-curve", "Mean headroom recovered", axis, curve, **options))
    return plots


def _curve_plots(report: Mapping[str, Any]) -> list[Plot]:
    curves = report.get("curves")
    if not curves:
        return []
    names = _curve_domains(report)
    no_values = [None] * len(curves["step"])

    def by_domain(key: str) -> dict[str, Sequence[float | None]]:
        return {name: curves[key].get(name, no_values) for name in names}

    cut = {"truncated": ("bad", curves["truncated"])}
    plots = [
        *_loss_plots(curves, by_domain("loss"), report.get("objectives", {})),
        figures.draw_by_domain(
            "length", "Length of the student's responses", curves, by_domain("length"), label="tokens"
        ),
        figures.draw_lines("truncated", "Responses cut at the token limit", curves, cut, percent=True),
        *reward_plots(curves, names),
        *end_loss_plots(curves, names),
        *indexer_plots(curves),
        *_share_plots(curves, names),
        *_entropy_plot(curves),
    ]
    if any(v is not None for v in _mean_over_domains(curves["argmax_agreement"])):
        title = "Tokens where student and expert have the same first choice"
        agreement = by_domain("argmax_agreement")
        plots.append(figures.draw_by_domain("agreement", title, curves, agreement, percent=True))
    if curves["positions"]:
        plots.append(figures.draw_positions(curves["step"], curves["positions"]))
    return plots


def _loss_plots(
    curves: Mapping[str, Any], losses: Mapping[str, Sequence[float | None]], objectives: Mapping[str, str]
) -> list[Plot]:
    """Plot the domains' losses, apart for each objective: the values of two objectives cannot be compared. `objectives`: domain -> kind,
    empty if all domains have the same."""
    options = {"log": True, "label": "nats a token"}
    kinds = dict.fromkeys(objectives.get(name, "") for name in losses)
    if len(kinds) <= 1:
        return [figures.draw_by_domain("loss", "Loss", curves, losses, **options)]
    no_values = [None] * len(curves["step"])
    plots = []
    for kind in kinds:
        own = {name: curve if objectives.get(name, "") == kind else no_values for name, curve in losses.items()}
        plots.append(figures.draw_by_domain(f"loss-{kind}", f"Loss of objective {kind}", curves, own, **options))
    return plots


def _share_plots(curves: Mapping[str, Any], names: Sequence[str]) -> list[Plot]:
    """Plot each domain's share of every step: of the samples, and of the trained tokens, which is its weight in a token mean."""
    return [
        figures.draw_by_domain(
            f"{of}-share",
            f"Share of the {noun}",
            curves,
            {name: curves[f"{of}_share"].get(name, [None] * len(curves["step"])) for name in names},
            percent=True,
        )
        for of, noun in (("sample", "samples"), ("token", "trained tokens"))
    ]


def _entropy_plot(curves: Mapping[str, Any]) -> list[Plot]:
    """Plot the entropies of student and experts together; return no plot if the records have no entropies."""
    student, experts = (_mean_over_domains(curves[key]) for key in ("student_entropy", "teacher_entropy"))
    lines = {
        label: (colour, curve)
        for label, colour, curve in (("student", "merged", student), ("experts", "expert", experts))
        if any(value is not None for value in curve)
    }
    note = "Mean over the domains, on the student's own responses."
    title = "Entropy of the next token"
    return [figures.draw_lines("entropy", title, curves, lines, label="nats", note=note)] if lines else []


def _mean_over_domains(curves: Mapping[str, Sequence[float | None]]) -> list[float | None]:
    return [mean_or_none(row) for row in zip(*curves.values(), strict=True)]


def _time_plots(report: Mapping[str, Any]) -> list[Plot]:
    if not report["phase_s"]:
        return []
    plots = [figures.draw_phases(report["phase_s"])]
    if report.get("utilisation"):
        plots.append(figures.draw_utilisation(report["utilisation"]))
    if "curves" in report:
        speed = {"tokens": ("expert", report["curves"]["tokens_per_s"])}
        title = "Response tokens a second, all phases counted"
        plots.append(figures.draw_lines("speed", title, report["curves"], speed))
    return plots


def _matrix_plot(run: RunFiles) -> Plot:
    domains = list(dict.fromkeys(d for e in run.matrix.values() for d in e.scores))
    out_of_date = {MERGED: f"{MERGED} (out of date)"} if explain_stale_matrix(run) else {}
    return figures.draw_matrix(
        {show_control_characters(out_of_date.get(name, name)): e.accuracy for name, e in run.matrix.items()}, domains
    )


def _baseline_plots(report: Mapping[str, Any]) -> list[Plot]:
    if not report.get("baselines") or report["mean_headroom"] is None:
        return []
    merge = {
        "method": "opd",
        "name": "on-policy (this merge)",
        "mean_headroom": report["mean_headroom"],
        "interval": report.get("mean_headroom_interval"),
    }
    usable = [b for b in report["baselines"] if b["mean_headroom"] is not None and not b["stale"]]
    if not usable:
        return []
    # Of a method with several budgets only the largest stands among the methods; the second plot has all of them.
    most_tokens = {b["label"]: max(c["tokens"] or 0 for c in usable if c["label"] == b["label"]) for b in usable}
    rows = [
        {**b, "name": show_control_characters(baseline_name(b))}
        for b in usable
        if (b["tokens"] or 0) == most_tokens[b["label"]]
    ]
    plots = [figures.draw_methods(sorted([merge, *rows], key=lambda row: -row["mean_headroom"]))]
    curve: dict[str, list[tuple[float, float, Sequence[float] | None]]] = {}
    points = [p for p in report.get("evaluations", ()) if p["mean_headroom"] is not None]
    if points:
        curve[merge["name"]] = [(p["tokens"], p["mean_headroom"], p.get("mean_headroom_interval")) for p in points]
    for b in sorted((b for b in usable if b["tokens"]), key=lambda b: b["tokens"]):
        curve.setdefault(show_control_characters(b["label"]), []).append(
            (b["tokens"], b["mean_headroom"], b["interval"])
        )
    if len(curve) > 1:
        plots.append(figures.draw_budgets(curve))
    return plots


def baseline_name(row: Mapping[str, Any]) -> str:
    """Return a baseline's label, with its share of the merge's tokens if that is less than all of them."""
    share = row["token_share"]
    return row["label"] + ("" if share in (None, 1.0) else f", {100 * share:.0f} % of the tokens")


def _sample_answers(run: RunFiles) -> list[dict[str, Any]]:
    """Return some exam prompts with the answers of the student before, the merged model and the expert.

    Each domain gets a few prompts, those with the merged model's worst answers first.
    """
    models = [
        {answer.prompt_id: answer for answer in evaluation.answers} if evaluation else {}
        for evaluation in (run.before, latest_exam(run), run.expert)
    ]
    ids: dict[str, list[ScoredAnswer]] = {}
    for answer in models[1].values():
        ids.setdefault(answer.domain, []).append(answer)
    worst_first = [sorted(answers, key=lambda answer: answer.score)[:SAMPLES_PER_DOMAIN] for answers in ids.values()]
    worst_answers = [answer for answers in worst_first for answer in answers][:MOST_SAMPLES]
    return [
        {"domain": a.domain, "prompt": a.prompt, "answer": a.answer, "cells": [m.get(a.prompt_id) for m in models]}
        for a in worst_answers
    ]


def _expert_rows(run: RunFiles, report: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return a row for the student and for each expert: name, domains, hashes of its files, and its facts from the manifest."""
    if not run.manifest:
        return []
    sizes = report.get("models", {})
    student = {"name": "student", "domains": "", "files": run.manifest.get("student", {}), **sizes.get("student", {})}
    experts = [
        {
            "name": name,
            "domains": ", ".join(expert["domains"]),
            "files": {**expert["weights"], **expert.get("config", {}), **expert.get("adapter", {})},
            **sizes.get("experts", {}).get(name, {}),
        }
        for name, expert in run.manifest.get("experts", {}).items()
    ]
    return [student, *experts]
