"""The loss of indexers that learn in a merge, in its report."""

from __future__ import annotations

import json
from pathlib import Path

from opd.report import full_report, read_run, write_report
from tests.unit.opd.report.conftest import record


def test_the_loss_of_indexers_has_a_curve_and_a_plot(run_dir: Path) -> None:
    steps = [
        record(number) | loss for number, loss in ((1, {"indexer_loss": 0.5}), (2, {}), (3, {"indexer_loss": 0.25}))
    ]
    (run_dir / "metrics.jsonl").write_text("".join(json.dumps(step) + "\n" for step in steps))
    assert full_report(read_run(run_dir))["curves"]["indexer_loss"] == [0.5, None, 0.25]
    write_report(run_dir)
    assert "plot-indexer-loss" in (run_dir / "report.html").read_text()


def test_a_run_in_which_no_indexer_learns_says_nothing_of_it(run_dir: Path) -> None:
    assert "indexer_loss" not in full_report(read_run(run_dir))["curves"]
