"""One picture of a finished run: how the loss of each domain fell, and what each domain gained.

    python docs/make_figure.py runs/quickstart docs/results/quickstart.png

Reads metrics.jsonl and report.json of the run directory.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")

from matplotlib import colormaps
from matplotlib import pyplot as plt
from matplotlib.axes import Axes

from opd.records.step import StepRecord
from opd.run.metrics import MetricsFile
from opd.run.paths import RunPaths

BARS = (("before", "student before", "#bbbbbb"), ("expert", "expert", "#4477aa"), ("after", "merged", "#228833"))
BAR_WIDTH = 0.27
SMOOTHED_OVER = 60
"""The curve is a running mean over 1/60 of the run: single steps of one domain are noisy."""


def loss_curves(records: Sequence[StepRecord]) -> dict[str, tuple[list[int], list[float]]]:
    """Domain -> steps and running mean of its loss; steps in which a domain had no token are left out."""
    curves: dict[str, tuple[list[int], list[float]]] = {}
    for record in records:
        for domain, stats in record.domains.items():
            if stats.tokens and stats.loss is not None:
                steps, losses = curves.setdefault(domain, ([], []))
                steps.append(record.step)
                losses.append(stats.loss)
    window = max(1, len(records) // SMOOTHED_OVER)
    return {domain: (steps, running_mean(losses, window)) for domain, (steps, losses) in curves.items()}


def running_mean(values: Sequence[float], window: int) -> list[float]:
    """Mean of each value and up to `window - 1` before it."""
    parts = [values[max(0, i + 1 - window) : i + 1] for i in range(len(values))]
    return [sum(part) / len(part) for part in parts]


def draw_losses(axes: Axes, curves: Mapping[str, tuple[Sequence[int], Sequence[float]]]) -> None:
    """Loss per domain over the steps, logarithmic."""
    colours = colormaps["tab20" if len(curves) > 10 else "tab10"]
    for index, (domain, (steps, losses)) in enumerate(curves.items()):
        axes.plot(steps, losses, label=domain, color=colours(index % colours.N), linewidth=1.3)
    axes.set_yscale("log", nonpositive="mask")
    axes.set(title="Loss per domain", xlabel="step", ylabel="loss, nats a token")
    axes.grid(True, which="major", alpha=0.3)
    if curves:
        axes.legend(fontsize=8, ncols=2)


def draw_accuracies(axes: Axes, domains: Mapping[str, Mapping[str, Any]]) -> None:
    """Accuracy per domain: student before, expert, merged."""
    for offset, (key, label, colour) in zip((-BAR_WIDTH, 0.0, BAR_WIDTH), BARS, strict=True):
        places = [index + offset for index in range(len(domains))]
        axes.bar(places, [d[key] for d in domains.values()], BAR_WIDTH, label=label, color=colour)
    axes.set_xticks(range(len(domains)), list(domains), rotation=45, ha="right")
    axes.set_title("Held-out accuracy", pad=24)  # the legend lies between: below it would meet the names
    axes.set(ylabel="share of right answers", ylim=(0, 1.02))
    axes.grid(True, axis="y", alpha=0.3)
    axes.set_axisbelow(True)
    axes.legend(fontsize=8, loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=len(BARS), frameon=False)


def make_figure(run_dir: Path, output: Path) -> None:
    """Draw the run and write a PNG. Raises: FileNotFoundError if the run has no report yet."""
    report = json.loads(RunPaths(run_dir).report.read_text(encoding="utf-8"))
    curves = loss_curves(MetricsFile(RunPaths(run_dir).metrics).read())
    width = 6 + max(5.0, 0.6 * len(report["domains"]))
    figure, (left, right) = plt.subplots(1, 2, figsize=(width, 4.8), layout="constrained")
    draw_losses(left, curves)
    draw_accuracies(right, report["domains"])
    share = report["mean_headroom"]
    recovered = "" if share is None else f", {100 * share:.0f} % of the headroom recovered"
    figure.suptitle(f"{report['name']}: {len(curves)} experts merged in {report['steps']} steps{recovered}")
    output.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(output, dpi=150)
    plt.close(figure)


def main() -> int:
    parser = argparse.ArgumentParser(description="Draw a finished run.")
    parser.add_argument("run_dir", type=Path, help="run directory with metrics.jsonl and report.json")
    parser.add_argument("output", type=Path, help="PNG to write")
    arguments = parser.parse_args()
    try:
        make_figure(arguments.run_dir, arguments.output)
    except FileNotFoundError as error:
        print(f"{error.filename}: no such file; the merge has to be finished first", file=sys.stderr)
        return 2
    print(arguments.output)
    return 0


if __name__ == "__main__":
    sys.exit(main())
