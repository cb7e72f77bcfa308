"""The loss of the student's sparse indexers in the report."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import TYPE_CHECKING, Any

from opd.records.step import StepRecord

if TYPE_CHECKING:
    from opd.report.figures import Plot


def indexer_curves(points: Sequence[Sequence[StepRecord]]) -> dict[str, list[float | None]]:
    """Return the curve `indexer_loss`; nothing for runs in which no indexer learns. `points`: groups of steps."""
    losses = [[record.indexer_loss for record in part if record.indexer_loss is not None] for part in points]
    return {"indexer_loss": [fmean(part) if part else None for part in losses]} if any(losses) else {}


def indexer_plots(curves: Mapping[str, Any]) -> list[Plot]:
    """Plot the loss of indexers, if the curves have it."""
    from opd.report import figures

    if "indexer_loss" not in curves:
        return []
    lines = {"indexer-loss": ("expert", curves["indexer_loss"])}
    title = "Loss of the indexers: KL to the attention that they serve"
    return [figures.draw_lines("indexer-loss", title, curves, lines, label="nats a position")]
