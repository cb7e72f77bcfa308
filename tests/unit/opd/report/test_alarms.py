"""The monitors' alarms, in report.json and on the page."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from opd.errors import RunDirError
from opd.monitors.alarms import Alarms, AlarmSample
from opd.records.step import AlarmRecord
from opd.report import full_report, read_run, write_report
from opd.report.run import chain_rounds
from tests.unit.opd.report.conftest import HOSTILE, record


def alarm(step: int, value: float, action: str = "warn", domain: str = "letters", **more: Any) -> AlarmRecord:
    plain: dict[str, Any] = {"signal": "repetition", "limit": 0.35, "since": step}
    return AlarmRecord(**plain | {"domain": domain, "value": value, "action": action} | more)


def sample(domain: str, **more: Any) -> AlarmSample:
    plain: dict[str, Any] = {"signal": "repetition", "sample_id": "s", "prompt": "question", "response": "hahaha"}
    return AlarmSample(**plain | {"domain": domain, "tokens": 24, "truncated": True, "number": 0.95} | more)


def saw(root: Path, step: int, alarms: list[AlarmRecord], samples: list[AlarmSample]) -> None:
    (root / "monitors").mkdir(exist_ok=True)
    found = Alarms(step=step, alarms=tuple(alarms), samples=tuple(samples), readings={})
    found.save(root / "monitors" / f"step-{step:06d}.json")


def rewrite(root: Path, by_step: dict[int, list[AlarmRecord]], steps: int) -> None:
    records = [record(n, alarms=[asdict(a) for a in by_step.get(n, [])]) for n in range(1, steps + 1)]
    (root / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))


@pytest.fixture
def stopped(run_dir: Path, no_plots: None) -> Path:
    """A merge of four steps that a monitor stopped after the third, after two with warnings."""
    for name in ("report.json", "evaluation/after.json", "evaluation/matrix.json"):
        (run_dir / name).unlink()
    stop = alarm(3, 0.8, "stop", limit=0.5)
    other = alarm(3, 12.0, domain="", signal="grad_norm", limit=10.0)
    rewrite(run_dir, {1: [alarm(1, 0.4)], 2: [alarm(2, 0.45, since=1)], 3: [stop, other]}, 3)
    saw(run_dir, 1, [alarm(1, 0.4)], [sample("letters", response="early")])
    shown = [sample("letters", response=f"loop {HOSTILE}"), sample("sums", signal="grad_norm", number=None)]
    saw(run_dir, 3, [stop, other], shown)
    return run_dir


def test_alarms_are_rows_from_where_they_began_to_where_they_ended(stopped: Path) -> None:
    warned, ended, grad = full_report(read_run(stopped))["alarms"]
    assert (warned["action"], warned["from_step"], warned["to_step"], warned["worst"]) == ("warn", 1, 2, 0.45)
    assert not warned["ended"] and [s["response"] for s in warned["samples"]] == ["early"]
    assert (ended["action"], ended["from_step"], ended["limit"], ended["ended"]) == ("stop", 3, 0.5, True)
    assert "domain letters: 0.80 of the responses" in ended["says"] and ended["advice"]
    assert [s["domain"] for s in ended["samples"]] == ["letters"]
    assert not grad["ended"] and [s["domain"] for s in grad["samples"]] == ["sums"], "those of all domains"


def test_the_page_shows_why_it_ended_and_the_samples(stopped: Path) -> None:
    write_report(stopped)
    text = (stopped / "report.html").read_text()
    assert "Stopped by a monitor after step 3:" in text and 'id="alarms"' in text
    assert "loop &lt;script&gt;" in text and text.count("<script>") == 1, "escaped like every other answer"
    assert "early" in text and "all domains: the gradient" in text
    assert not (stopped / "report.json").exists(), "it is not finished"


def test_a_pause_that_was_gone_on_from_is_no_banner(stopped: Path) -> None:
    rewrite(stopped, {2: [alarm(2, 0.6, "pause")], 3: [alarm(3, 0.6, "pause", since=2)]}, 3)
    write_report(stopped)
    text = (stopped / "report.html").read_text()
    assert "by a monitor" not in text and "Steps 2 to 3" in text
    rewrite(stopped, {3: [alarm(3, 0.6, "pause")]}, 3)
    write_report(stopped)
    assert "Paused by a monitor after step 3:" in (stopped / "report.html").read_text()


def test_a_run_without_alarms_has_no_such_section(run_dir: Path, no_plots: None) -> None:
    report = write_report(run_dir)
    assert "alarms" not in report and 'id="alarms"' not in (run_dir / "report.html").read_text()


def test_alarms_of_rounds_are_counted_on(stopped: Path) -> None:
    one = read_run(stopped)
    rows = full_report(chain_rounds(replace(one, rounds=[one, one])))["alarms"]
    assert [(row["from_step"], row["to_step"], row["ended"]) for row in rows] == [
        (1, 2, False), (3, 3, False), (3, 3, False), (4, 5, False), (6, 6, True), (6, 6, False),
    ]  # fmt: skip
    assert rows[4]["samples"] == rows[1]["samples"] != []


def test_a_damaged_file_is_named(stopped: Path) -> None:
    (stopped / "monitors" / "step-000003.json").write_text('{"format": 1, "step": 3}')
    with pytest.raises(RunDirError, match=r"step-000003\.json"):
        read_run(stopped)
