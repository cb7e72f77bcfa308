"""A run that was branched or extended says so in its report and on its page."""

from __future__ import annotations

import json
from pathlib import Path

from opd.report import full_report, read_run
from opd.report.page import render_page
from tests.unit.opd.report.conftest import put

BRANCHED = {"event": "branched", "run": "/home/a/runs/first", "step": 50, "changed": {"trainer.lr": [1e-5, None]}}
EXTENDED = {"event": "extended", "after_step": 20, "steps": [20, 40], "lr_scheduler_type": "linear", "command": "opd"}


def test_the_past_of_a_run_stands_in_report_and_page(run_dir: Path) -> None:
    assert "lineage" not in full_report(read_run(run_dir))
    manifest = run_dir / "manifest.json"
    known = json.loads(manifest.read_text()) if manifest.exists() else {}
    put(manifest, known | {"lineage": [BRANCHED, EXTENDED]})
    run = read_run(run_dir)
    report = full_report(run)
    assert report["lineage"] == [
        "branched from step 50 of first, with weights and optimiser; changed: trainer.lr 1e-05 → nothing",
        "extended after step 20 from 20 to 40 steps; up to there the linear decay was that of 20 steps",
    ]
    assert all(f"Lineage: {line}." in render_page(report, run) for line in report["lineage"])
