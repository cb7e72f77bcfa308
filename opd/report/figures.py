"""The plots of report.html."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.patches import Rectangle
from matplotlib.ticker import FuncFormatter, MaxNLocator, NullFormatter, PercentFormatter

from opd.report.drawing import COLOURS, WIDTH, Plot, domain_style, draw_plot, format_thousands
from opd.report.exams import moves_label

LONGEST_NAME = 32
"""Most characters of a name beside an axis."""

# What the merge gained

BARS = (("before", "student before"), ("after", "merged"), ("expert", "expert"))
"""Keys of the report and their labels, in the order of the bars."""
BAR_COLOURS = {"before": "before", "after": "merged", "expert": "expert"}
ROW = 0.42
"""Height of one domain's row, in inches."""


def draw_accuracies(domains: Mapping[str, Mapping[str, Any]]) -> Plot:
    """Draw bars for student before, merged and expert on every domain, with intervals where they are known.

    A run without experts gets no bars for them.
    """
    bars = [(key, label) for key, label in BARS if all(d[key] is not None for d in domains.values())]

    def draw(axes: Axes) -> None:
        rows = np.arange(len(domains))
        for slot, (key, _) in enumerate(bars):
            values = [d[key] for d in domains.values()]
            colour = COLOURS[BAR_COLOURS[key]]
            axes.barh(rows + (slot - 1) * 0.27, values, 0.25, color=colour)
            for row, d in zip(rows, domains.values(), strict=True):
                if f"{key}_interval" in d:
                    y = row + (slot - 1) * 0.27
                    axes.plot(d[f"{key}_interval"], [y, y], color=COLOURS["ink"], linewidth=0.9, alpha=0.7)
        _label_rows(axes, list(domains))
        _use_percent_axis(axes, "right answers")
        axes.set_xlim(0, 1.02)

    legend = tuple((BAR_COLOURS[key], label) for key, label in bars)
    return draw_plot("accuracy", "Right answers by domain", draw, height=0.8 + ROW * len(domains), legend=legend)


def draw_headrooms(domains: Mapping[str, Mapping[str, Any]], gate: float | None) -> Plot:
    """Draw a point with its interval for each domain: the headroom, which is how far the student came towards its expert."""
    points = [
        (name, "merged", d["headroom"], d.get("headroom_interval"))
        for name, d in domains.items()
        if d["headroom"] is not None
    ]
    note = "0 % is the student before the merge, 100 % the expert."
    note += " Bars are 95 % intervals." if any(interval for *_, interval in points) else ""
    note += "" if gate is None else " The dashed line is the gate."

    def draw(axes: Axes) -> None:
        _draw_shares(axes, points, "headroom recovered", gate)

    return draw_plot("headroom", "Headroom recovered by domain", draw, height=0.8 + ROW * len(points), note=note)


def draw_by_length(name: str, title: str, groups: Sequence[Mapping[str, Any]]) -> Plot:
    """Draw success with its intervals against the length of the task, for those of student before, merged and expert that
    took the exam."""
    bars = [(key, label) for key, label in BARS if any(group[key] is not None for group in groups)]

    def draw(axes: Axes) -> None:
        for slot, (key, _) in enumerate(bars):
            colour = COLOURS[BAR_COLOURS[key]]
            points = [(at + (slot - 1) * 0.12, group) for at, group in enumerate(groups) if group[key] is not None]
            axes.plot([at for at, _ in points], [group[key] for _, group in points], "o-", color=colour, markersize=4.5)
            for at, group in points:
                axes.plot([at, at], group[f"{key}_interval"], color=colour, linewidth=2.5, alpha=0.45)
        axes.set_xticks(range(len(groups)), [f"{moves_label(group)}\n{group['questions']} tasks" for group in groups])
        axes.set_xlim(-0.5, len(groups) - 0.5)
        axes.set_ylim(-0.02, 1.02)
        axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
        axes.set(xlabel="right moves of the task", ylabel="success")

    return draw_plot(name, title, draw, legend=tuple((BAR_COLOURS[key], label) for key, label in bars))


def _draw_shares(
    axes: Axes, points: Sequence[tuple[str, str, float, Sequence[float] | None]], label: str, gate: float | None = None
) -> None:
    """Draw a row for each name: a point with its interval, as a share of the headroom. `points`: name, colour variable, share,
    and interval if it is known."""
    ends = [0.0, 1.0]
    for row, (_, colour, share, interval) in enumerate(points):
        if interval:
            axes.plot(interval, [row, row], color=COLOURS[colour], linewidth=2.5, alpha=0.45)
        axes.plot(share, row, "o", color=COLOURS[colour], markersize=6)
        ends += [share, *(interval or ())]
    axes.axvline(1.0, color=COLOURS["expert"], linewidth=1.2)
    axes.axvline(0.0, color=COLOURS["before"], linewidth=1.2)
    if gate is not None:
        axes.axvline(gate, color=COLOURS["bad"], linewidth=1.2, linestyle="--")
    _label_rows(axes, [name for name, *_ in points])
    _use_percent_axis(axes, label)
    axes.set_xlim(max(-1.0, min(ends) - 0.05), min(2.0, max(ends) + 0.05))


def _shorten_name(name: str) -> str:
    return name if len(name) <= LONGEST_NAME else f"{name[: LONGEST_NAME - 1]}…"


def _label_rows(axes: Axes, names: Sequence[str]) -> None:
    axes.set_yticks(range(len(names)), [_shorten_name(name) for name in names], color=COLOURS["ink"])
    axes.set_ylim(len(names) - 0.5, -0.5)
    axes.tick_params(axis="y", length=0)
    axes.grid(False, axis="y")


def _use_percent_axis(axes: Axes, label: str) -> None:
    axes.xaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    axes.set_xlabel(label)


def draw_rounds(mean: Sequence[float | None], domains: Mapping[str, Sequence[float | None]]) -> Plot:
    """Draw the headroom after each round: the mean, and a thin line for each domain."""
    rounds = range(len(mean) + 1)

    def draw(axes: Axes) -> None:
        for index, curve in enumerate(domains.values()):
            _draw_curve(axes, rounds, [0.0, *curve], gid=f"domain-{index}", linewidth=1.0, **domain_style(index))
        _draw_curve(axes, rounds, [0.0, *mean], color=COLOURS["merged"], linewidth=2.5, marker="o", markersize=5)
        axes.set_xticks(rounds, ["start", *(f"round {round_number}" for round_number in rounds[1:])])
        axes.axhline(1.0, color=COLOURS["expert"], linewidth=1.2)
        axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
        axes.set_ylabel("headroom recovered")

    note = "The thick line is the mean, the others are the domains; 100 % is each round's expert."
    return draw_plot("rounds", "Headroom after each round", draw, note=note)


# How it went

Curve = Sequence[float | None]


def draw_by_domain(
    name: str, title: str, curves: Mapping[str, Any], values: Mapping[str, Curve], **options: Any
) -> Plot:
    """Draw a line for each domain over `step` and `tokens` of the curves.

    Options: `log` or `percent` (scale of the y axis), `label` (its name), `markers` (a dot at each value), `note`.
    """

    def draw(axes: Axes) -> None:
        marker = "o" if options.get("markers") else None
        for index, curve in enumerate(values.values()):
            _draw_curve(axes, curves["step"], curve, gid=f"domain-{index}", marker=marker, **domain_style(index))
        _label_steps(axes, curves)
        _y_axis(axes, options)

    return draw_plot(name, title, draw, note=options.get("note", ""))


def draw_by_turn(name: str, title: str, values: Mapping[str, Curve]) -> Plot:
    """Draw a line over the turns of an episode for each domain, as long as its episodes are."""

    def draw(axes: Axes) -> None:
        for index, curve in enumerate(values.values()):
            turns = range(1, 1 + len(curve))
            _draw_curve(axes, turns, curve, gid=f"domain-{index}", marker="o", **domain_style(index))
        axes.xaxis.set_major_locator(MaxNLocator(nbins=8, integer=True))
        axes.set_xlabel("turn of the episode")
        _y_axis(axes, {"label": "nats a token"})

    return draw_plot(name, title, draw, note="All steps of the run, weighted by tokens.")


def draw_lines(
    name: str, title: str, curves: Mapping[str, Any], values: Mapping[str, tuple[str, Curve]], **options: Any
) -> Plot:
    """Draw lines over `step` and `tokens` of the curves, each in a colour of its own. `values`: label -> (colour variable, curve).

    Options are those of `draw_by_domain`, and `band`: the two curves between which an area around the first line is filled.
    """

    def draw(axes: Axes) -> None:
        if "band" in options:
            low, high = (np.array(curve, dtype=float) for curve in options["band"])
            colour = COLOURS[next(iter(values.values()))[0]]
            axes.fill_between(curves["step"], low, high, color=colour, alpha=0.2, linewidth=0)
        for colour, curve in values.values():
            marker = "o" if options.get("markers") else None
            _draw_curve(axes, curves["step"], curve, color=COLOURS[colour], marker=marker)
        _label_steps(axes, curves)
        _y_axis(axes, options)

    legend = tuple((colour, label) for label, (colour, _) in values.items()) if len(values) > 1 else ()
    return draw_plot(name, title, draw, legend=legend, note=options.get("note", ""))


def _draw_curve(axes: Axes, x: Sequence[float], curve: Curve, **style: Any) -> None:
    """Draw a line with small dots, if it has a `marker`, and a gap for each missing value."""
    axes.plot(x, np.array(curve, dtype=float), **{"markersize": 3.5, **style})  # numpy makes NaN of None


def _label_steps(axes: Axes, curves: Mapping[str, Any]) -> None:
    """Label the x axis with steps, and below each step with the response tokens that were trained on by then."""

    def format_tick(value: float, _: int | None = None) -> str:
        tokens = float(np.interp(value, [0, *curves["step"]], [0, *curves["tokens"]]))
        return f"{value:g}\n{format_thousands(tokens)}" if value >= 0 else ""

    axes.xaxis.set_major_locator(MaxNLocator(nbins=6, integer=True, steps=[1, 2, 5, 10]))
    axes.xaxis.set_major_formatter(FuncFormatter(format_tick))
    axes.set_xlabel("step, and response tokens so far")


def _y_axis(axes: Axes, options: Mapping[str, Any]) -> None:
    low, high = axes.get_ylim()
    if options.get("log"):
        _use_log_axis(axes)
    elif options.get("percent"):
        axes.set_ylim(min(0.0, low), max(0.05, high))  # a very small share must look small
        axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    else:
        axes.set_ylim(bottom=min(0.0, low))
    axes.set_ylabel(options.get("label", ""))


def _use_log_axis(axes: Axes) -> None:
    """Make the y axis logarithmic, unless no value is above 0: the loss of a run without teachers is 0 throughout."""
    if not any((np.asarray(line.get_ydata(), dtype=float) > 0).any() for line in axes.get_lines()):
        return
    axes.set_yscale("log", nonpositive="mask")
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.yaxis.set_minor_formatter(NullFormatter())


def draw_phases(phase_s: Mapping[str, float]) -> Plot:
    """Draw a bar for each phase of a step: its seconds in the whole run."""
    total = sum(phase_s.values()) or 1.0

    def draw(axes: Axes) -> None:
        _draw_bars(axes, phase_s, lambda s: f"{s:,.{0 if s >= 10 else 1}f} s, {100 * s / total:.0f} %")
        axes.set_xlim(0, 1.25 * max(phase_s.values(), default=1.0) or 1.0)
        axes.set_xlabel("seconds")

    return draw_plot("phases", "Where the time went", draw, height=0.8 + 0.36 * len(phase_s))


def draw_utilisation(shares: Mapping[str, float]) -> Plot:
    """Draw a bar for each role: the share of the time in which it was at work."""

    def draw(axes: Axes) -> None:
        _draw_bars(axes, {role: 100 * share for role, share in shares.items()}, "{:.0f} %".format)
        axes.set_xlim(0, 110)
        axes.set_xlabel("% of the time of all steps")

    return draw_plot("utilisation", "How busy the roles were", draw, height=0.8 + 0.36 * len(shares))


def _draw_bars(axes: Axes, values: Mapping[str, float], label: Callable[[float], str]) -> None:
    bars = axes.barh(range(len(values)), list(values.values()), 0.6, color=COLOURS["expert"])
    axes.bar_label(bars, list(map(label, values.values())), padding=4, color=COLOURS["ink"], fontsize=8.5)
    _label_rows(axes, list(values))


def draw_positions(step: Sequence[int], values: Mapping[str, Curve]) -> Plot:
    """Draw the loss against the place in the response, at the start, in the middle and at the end of the merge."""
    last = len(step) - 1
    # In a short merge two or three of these are the same step; then the entry that comes later here replaces the earlier one.
    moments = {last // 2: ("expert", "middle"), 0: ("before", "start"), last: ("merged", "end")}
    moments = dict(sorted(moments.items()))

    def draw(axes: Axes) -> None:
        for index, (colour, _) in moments.items():
            losses = [curve[index] for curve in values.values()]
            _draw_curve(axes, range(len(values)), losses, color=COLOURS[colour], marker="o")
        axes.set_xticks(range(len(values)), list(values))
        _use_log_axis(axes)
        axes.set(xlabel="place of the token in the response, from 0", ylabel="nats a token")

    legend = tuple((colour, f"{word} (step {step[i]})") for i, (colour, word) in moments.items())
    return draw_plot("positions", "Loss by position in the response", draw, legend=legend)


# Beside other models

CELL = 0.34
"""Width of one domain's column, in inches; a model's row is a little lower."""


def draw_matrix(models: Mapping[str, Mapping[str, float]], domains: Sequence[str]) -> Plot:
    """Draw a heat map of the accuracy of every model (rows) on every domain (columns)."""

    def draw(axes: Axes) -> None:
        for row, scores in enumerate(models.values()):
            for column, domain in enumerate(domains):
                if domain in scores:
                    value = scores[domain]
                    corner = (column - 0.47, row - 0.45)
                    axes.add_patch(Rectangle(corner, 0.94, 0.9, color=COLOURS["merged"], alpha=0.75 * value, lw=0))
                    axes.text(column, row, f"{100 * value:.0f}", ha="center", va="center", fontsize=7.5)
        _label_rows(axes, list(models))
        axes.set_xticks(
            range(len(domains)), [_shorten_name(name) for name in domains], rotation=90, color=COLOURS["ink"]
        )
        axes.set_xlim(-0.5, len(domains) - 0.5)
        axes.tick_params(axis="x", length=0)
        axes.grid(False)
        for spine in axes.spines.values():
            spine.set_visible(False)

    note = "Right answers in per cent: a row is a model, a column a domain."
    size = {"width": max(WIDTH, 1.6 + CELL * len(domains)), "height": 1.1 + CELL * 0.8 * len(models)}
    return draw_plot("matrix", "Every model on every domain", draw, note=note, **size)


def draw_methods(rows: Sequence[Mapping[str, Any]]) -> Plot:
    """Draw a point with its interval for each method, this merge among them: its mean headroom."""
    points = [
        (row["name"], "merged" if row["method"] == "opd" else "expert", row["mean_headroom"], row["interval"])
        for row in rows
    ]

    def draw(axes: Axes) -> None:
        _draw_shares(axes, points, "mean headroom recovered")

    return draw_plot("methods", "Mean headroom of each method", draw, height=0.8 + 0.36 * len(rows))


def draw_budgets(curve: Mapping[str, Sequence[tuple[float, float, Sequence[float] | None]]]) -> Plot:
    """Draw the mean headroom against the tokens trained on. `curve`: label -> points (tokens, mean headroom, interval)."""
    colours = ["merged", *(f"s{i}" for i in (1, 4, 3, 5, 6, 8))]

    def draw(axes: Axes) -> None:
        for index, points in enumerate(curve.values()):
            colour = COLOURS[colours[index % len(colours)]]
            axes.plot([p[0] for p in points], [p[1] for p in points], "o-", color=colour, markersize=4)
            for tokens, _, interval in points:
                if interval:
                    axes.plot([tokens, tokens], interval, color=colour, linewidth=2.5, alpha=0.4)
        axes.xaxis.set_major_locator(MaxNLocator(nbins=6))
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: format_thousands(value) if value >= 0 else ""))
        axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
        axes.set_xlim(left=0)
        axes.set(xlabel="response tokens trained on", ylabel="mean headroom")

    legend = tuple((colours[i % len(colours)], label) for i, label in enumerate(curve))
    return draw_plot("budget", "Headroom against the token budget", draw, legend=legend)
