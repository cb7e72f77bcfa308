"""The guard's findings, in report.json and on the page; nothing where none looked on."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from opd.records.episodes import EpisodesRecord
from opd.records.guard import GuardEvent, GuardRecord, GuardStats, Verdict
from opd.records.step import StepRecord
from opd.report import full_report, read_run, write_report
from tests.unit.opd.report.conftest import HOSTILE, record


def event(rule: str = "hidden-tests", text: str = "cat /tests/a", **verdict: Any) -> GuardEvent:
    known: dict[str, Any] = {"allowed": False, "stage": "rules", "suspicion": "certain", "reason": "It is hidden."}
    return GuardEvent(episode="s", turn=0, tool="shell", text=text, verdict=Verdict(rule=rule, **known | verdict))


def episodes(*events: GuardEvent, blocked: int = 0) -> dict[str, Any]:
    stats = GuardStats(checked=10, blocked_turns=blocked, events=events)
    return EpisodesRecord(episodes=4, guard=GuardRecord.from_stats(stats)).to_json()


def rewrite(root: Path, by_step: list[dict[str, Any]]) -> None:
    lines = [record(step, episodes=found) for step, found in enumerate(by_step, start=1)]
    (root / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def test_hits_verdicts_and_examples_rule_by_rule(run_dir: Path, no_plots: None) -> None:
    passed = event("network", "curl x.org", allowed=True, stage="judge", suspicion="rule")
    first = episodes(event(), event(text="cat /tests/b"), passed, blocked=2)
    rewrite(
        run_dir, [{"letters": first}, {"letters": episodes(event("network"), blocked=1)}, {}, {"letters": episodes()}]
    )
    report = full_report(read_run(run_dir))["guard"]
    assert report["domains"] == {"letters": {"episodes": 12, "checked": 30, "blocked_turns": 3}}
    assert report["course"] == {"step": [1, 2, 3, 4], "blocked": {"letters": [0.5, 0.25, None, 0.0]}}
    hidden, network = report["rules"]
    assert (hidden["rule"], hidden["hits"], hidden["blocked"], hidden["stages"]) == ("hidden-tests", 2, 2, {"rules": 2})
    assert [example["text"] for example in hidden["examples"]] == ["cat /tests/a"]
    assert (network["hits"], network["blocked"], network["stages"]) == (2, 1, {"judge": 1, "rules": 1})
    assert [(example["blocked"], example["stage"]) for example in network["examples"]] == [
        (True, "rules"),
        (False, "judge"),
    ]
    json.dumps(report)


def test_the_page_shows_them_and_what_a_policy_wrote_stays_text(run_dir: Path) -> None:
    rewrite(run_dir, [{"letters": episodes(event(text=HOSTILE, reason=HOSTILE), blocked=1)}] * 4)
    write_report(run_dir)
    page = (run_dir / "report.html").read_text()
    section = page[page.index('<section id="guard">') : page.index('<section id="learning">')]
    assert "hidden-tests" in section and "40 calls checked in 16 episodes, something blocked in 4 turns." in section
    assert "plot-guard-course" in section and "<script>" not in section and "&lt;script&gt;" in section


def test_nothing_where_no_guard_looks_on(run_dir: Path) -> None:
    plain = EpisodesRecord(episodes=4)
    assert "guard" not in plain.to_json()
    rewrite(run_dir, [{"letters": plain.to_json()}] * 4)
    assert "guard" not in full_report(read_run(run_dir))
    write_report(run_dir)
    assert 'id="guard"' not in (run_dir / "report.html").read_text()


def test_a_record_comes_back_from_its_line() -> None:
    stats = GuardStats(checked=3, blocked_turns=1, events=(event(), event("network", allowed=True)))
    one = StepRecord(step=1, episodes={"d": EpisodesRecord(episodes=2, guard=GuardRecord.from_stats(stats))})
    assert StepRecord.from_json(json.loads(json.dumps(one.to_json()))) == one
    assert asdict(one)["episodes"]["d"]["guard"]["rules"]["network"]["hits"] == 1
