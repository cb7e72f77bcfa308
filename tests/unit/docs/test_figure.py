"""docs/make_figure.py draws a finished run: the pictures of docs/results are made by it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from docs.make_figure import loss_curves, make_figure
from opd.records.step import DomainRecord, StepRecord
from opd.run.metrics import MetricsFile
from opd.run.paths import RunPaths

RECORDS = [
    StepRecord(step=1, domains={"a": DomainRecord(loss=2.0, tokens=3), "b": DomainRecord(loss=1.0, tokens=0)}),
    StepRecord(step=2, domains={"a": DomainRecord(loss=1.0, tokens=3), "b": DomainRecord(loss=0.5, tokens=4)}),
]


def test_a_step_without_tokens_of_a_domain_is_no_point() -> None:
    assert loss_curves(RECORDS) == {"a": ([1, 2], [2.0, 1.0]), "b": ([2], [0.5])}


def test_a_picture_of_a_run(tmp_path: Path) -> None:
    paths = RunPaths(tmp_path)
    for record in RECORDS:
        MetricsFile(paths.metrics).write(record)
    domains = {name: {"before": 0.1, "expert": 1.0, "after": 0.9} for name in "ab"}
    paths.report.write_text(
        json.dumps({"name": "two", "steps": 2, "mean_headroom": 0.89, "domains": domains}), encoding="utf-8"
    )
    make_figure(tmp_path, tmp_path / "out/two.png")
    assert (tmp_path / "out/two.png").read_bytes()[1:4] == b"PNG"


def test_a_run_without_a_report_is_named(tmp_path: Path) -> None:
    MetricsFile(RunPaths(tmp_path).metrics).write(RECORDS[0])
    with pytest.raises(FileNotFoundError, match="report"):
        make_figure(tmp_path, tmp_path / "two.png")
