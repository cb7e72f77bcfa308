"""Busy shares of the roles and ages of the tokens, from the records to the page."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from opd.records.step import StepRecord
from opd.report.page import render_page
from opd.report.run import read_run
from opd.report.summary import full_report, measure_utilisation, token_ages
from tests.unit.opd.report.conftest import record


def test_shares_are_of_the_time_of_the_steps_that_were_measured() -> None:
    records = [
        StepRecord(step=1, phase_s={"train": 100.0}),  # of an older release
        StepRecord(step=2, phase_s={"train": 2.0, "sync": 2.0}, busy_s={"rollout": 3.0, "trainer": 2.0}),
        StepRecord(step=3, phase_s={"train": 6.0}, busy_s={"rollout": 1.0, "trainer": 6.0}),
    ]
    assert measure_utilisation(records) == {"rollout": 0.4, "trainer": 0.8}
    assert measure_utilisation(records[:1]) == measure_utilisation([]) == {}


def test_ages_are_added_up_and_sorted_as_numbers() -> None:
    ages = ({"0": 3}, {"10": 1, "2": 4}, {}, {"2": 1})
    records = [StepRecord(step=step, token_ages=found) for step, found in enumerate(ages, 1)]
    assert list(token_ages(records).items()) == [("0", 3), ("2", 5), ("10", 1)]


@pytest.mark.parametrize("measured", [True, False])
def test_the_page_shows_how_busy_the_roles_were(measured: bool, run_dir: Path) -> None:
    busy = {"busy_s": {"rollout": 0.5, "teachers": 0.25, "trainer": 1.5}, "token_ages": {"1": 8}} if measured else {}
    (run_dir / "metrics.jsonl").write_text("".join(json.dumps(record(step, **busy)) + "\n" for step in range(1, 5)))
    run = read_run(run_dir)
    found = full_report(run)
    assert found["utilisation"] == ({"rollout": 0.25, "teachers": 0.125, "trainer": 0.75} if measured else {})
    assert found["token_ages"] == ({"1": 32} if measured else {})
    assert ("How busy the roles were" in render_page(found, run)) == measured
