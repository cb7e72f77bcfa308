"""Efforts in report.json, on the page and on the terminal: lengths, accuracies, and what falls though the effort rises."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from opd.report import effort_rows, full_report, read_run, write_report
from pipelines.commands.report import EFFORT_COLUMNS
from tests.unit.opd.report.conftest import evaluation, record

NAMES = ("math-low", "math-high", "math-max")


def add_efforts(run_dir: Path, tokens: tuple[float, ...], right: tuple[float, ...]) -> Path:
    """Make the run's domains three efforts of one; these are the merged model's figures."""
    domains = {name: {"prompts": "x.jsonl", "effort": name.split("-")[1]} for name in NAMES}
    (run_dir / "pipeline.yaml").write_text(
        yaml.safe_dump({"name": "three", "trainer": {"steps": 2}, "domains": domains}, sort_keys=False)
    )
    accuracy = dict(zip(NAMES, right, strict=True))
    for name in ("before", "after", "expert"):
        found = evaluation(name, accuracy)
        scores = {
            domain: replace(score, mean_tokens=length) if name == "after" else score
            for (domain, score), length in zip(found.scores.items(), tokens, strict=True)
        }
        (run_dir / "evaluation" / f"{name}.json").write_text(replace(found, scores=scores).as_text())
    steps = [record(number) for number in (1, 2)]
    for step in steps:
        loss = 1 / step["step"]
        step["domains"] = {
            name: {"loss": loss, "tokens": 8, "samples": 4, "end_loss": loss / 10, "end_tokens": 4} for name in NAMES
        }
    (run_dir / "metrics.jsonl").write_text("".join(json.dumps(step) + "\n" for step in steps))
    report = json.loads((run_dir / "report.json").read_text())
    (run_dir / "report.json").write_text(json.dumps(report | {"steps": 2}))
    for baseline in (run_dir / "baselines").iterdir():
        baseline.unlink()
    return run_dir


def test_rows_have_lengths_and_accuracies_of_all_three_models(run_dir: Path) -> None:
    report = full_report(read_run(add_efforts(run_dir, (2.0, 5.0, 9.0), (0.5, 0.5, 0.9))))
    rows: list[dict[str, Any]] = report["efforts"]["rows"]
    assert [(row["domain"], row["effort"], row["name"]) for row in rows] == [
        ("math", name.split("-")[1], name) for name in NAMES
    ]
    assert [row["after_tokens"] for row in rows] == [2.0, 5.0, 9.0] and rows[0]["expert_tokens"] == 7.5
    assert [row["after"] for row in rows] == [0.5, 0.5, 0.9]
    assert rows[0]["end_loss"] == pytest.approx(0.05), "of the last point of the curve"
    assert report["curves"]["end_loss"]["math-max"] == pytest.approx([0.1, 0.05])
    assert report["efforts"]["falls"] == []
    (first, *_) = effort_rows(report)
    assert len(first) == len(EFFORT_COLUMNS)
    assert first == ("math", "low", "7.5", "7.5", "2.0", "0.50", "0.50", "0.50", "0.0500")


def test_less_for_more_effort_is_said(run_dir: Path) -> None:
    write_report(add_efforts(run_dir, (4.0, 3.0, 9.0), (0.9, 0.4, 0.39)))
    page = (run_dir / "report.html").read_text()
    falls = json.loads((run_dir / "report.json").read_text())["efforts"]["falls"]
    assert falls == [
        "math: high writes 3.0 tokens, low 4.0",
        "math: high is right in 0.400, low in 0.900, beyond chance",
        "math: max is right in 0.390, high in 0.400, perhaps by chance",
    ]
    assert all(line in page for line in falls) and "plot-end-loss" in page


def test_a_run_without_efforts_says_nothing_of_them(run_dir: Path) -> None:
    report = full_report(read_run(run_dir))
    assert "efforts" not in report and "end_loss" not in report["curves"] and effort_rows(report) == []
    write_report(run_dir)
    assert 'id="efforts"' not in (run_dir / "report.html").read_text()
