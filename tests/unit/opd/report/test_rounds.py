"""A merge in rounds as one report: steps counted on, and what each round gained."""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from opd.errors import RunDirError
from opd.records.scores import Evaluation, combine_evaluations
from opd.report import domain_rows, full_report, read_run, round_rows, write_report

# Of the fixture: letters 0.2 -> 0.85 of 0.9, sums 0.5 -> 1.0 of 1.0, known 0.9 -> 0.85 of 0.8.
LATER = {"letters": 0.9, "sums": 0.9, "known": 0.9}


def scored(found: Evaluation, accuracy: dict[str, float]) -> Evaluation:
    return replace(
        found, scores={d: replace(s, accuracy=accuracy[d], low=accuracy[d] - 0.05, high=accuracy[d] + 0.05) for d, s in found.scores.items()}
    )  # fmt: skip


@pytest.fixture
def root(run_dir: Path, tmp_path: Path) -> Path:
    """The fixture's run as the first round, and a second one that was killed in its last step."""
    root = tmp_path / "rounds"
    first, second = root / "round-1", root / "round-2"
    root.mkdir()
    shutil.rmtree(run_dir / "baselines")
    (run_dir / "evaluation" / "matrix.json").unlink()
    shutil.copytree(run_dir, second)
    run_dir.rename(first)
    for name in ("report.json", "evaluation/after.json", "evaluation/step-000002.json"):
        (second / name).unlink()
    after = Evaluation.load(first / "evaluation" / "after.json")
    replace(after, model="student before").save(second / "evaluation" / "before.json")
    plan = [{"config": {"trainer": {"steps": steps}}} for steps in (4, 5)]
    (root / "rounds.json").write_text(json.dumps({"format": 1, "rounds": plan}))
    (root / "pipeline.yaml").write_text(yaml.safe_dump({"name": "three", "rounds": 2, "trainer": {"steps": 4}}))
    return root


def finish(root: Path) -> None:
    first, second = root / "round-1", root / "round-2"
    plan = json.loads((root / "rounds.json").read_text())
    plan["rounds"][1]["config"]["trainer"]["steps"] = 4  # it was not killed
    (root / "rounds.json").write_text(json.dumps(plan))
    shutil.copy(first / "report.json", second / "report.json")
    after = scored(Evaluation.load(first / "evaluation" / "after.json"), LATER)
    after.save(second / "evaluation" / "after.json")
    (root / "evaluation").mkdir()
    for source, name in ((first, "before"), (first, "expert"), (second, "after")):
        shutil.copy(source / "evaluation" / f"{name}.json", root / "evaluation" / f"{name}.json")
    stored = json.loads((first / "report.json").read_text())
    (root / "report.json").write_text(json.dumps(stored | {"steps": 8, "response_tokens": 192}))


def test_gains_of_each_round_and_of_all(root: Path) -> None:
    finish(root)
    report = full_report(read_run(root))
    assert {d: (v["before"], v["after"]) for d, v in report["domains"].items()} == {
        "letters": (0.2, 0.9), "sums": (0.5, 0.9), "known": (0.9, 0.9)
    }  # fmt: skip
    first, second = report["rounds"]
    assert (first["round"], first["steps"], first["response_tokens"], first["wall_s"]) == (1, 4, 96, 75.0)
    assert first["domains"]["letters"]["headroom"] == pytest.approx(0.65 / 0.7)
    assert first["mean_headroom"] == first["mean_headroom_in_round"] == pytest.approx((0.65 / 0.7 + 1) / 2)
    letters, sums, known = (second["domains"][name] for name in ("letters", "sums", "known"))
    assert (letters["before"], letters["after"], letters["expert"]) == (0.85, 0.9, 0.9)
    assert letters["headroom"] == pytest.approx(1)
    assert letters["headroom_in_round"] is None, "what was left is five questions of a hundred"
    assert sums["headroom"] == pytest.approx(0.8) and sums["headroom_in_round"] is None, "nothing was left"
    assert known["headroom"] is None
    assert second["mean_headroom"] == pytest.approx(0.9) and second["mean_headroom_in_round"] is None
    assert second["mean_gain"] == pytest.approx((0.05 - 0.1 + 0.05) / 3), "what was lost counts here"
    low, high = second["mean_headroom_interval"]
    assert low < 0.9 < high
    assert report["mean_headroom"] == pytest.approx(0.9)
    assert round_rows(report) == [("1", "4", "+0.37", "96 %", "96 %"), ("2", "4", "+0.00", "90 %", "-")]
    assert len(domain_rows(report)) == 4


def test_steps_are_counted_on(root: Path) -> None:
    finish(root)
    run = read_run(root)
    report = full_report(run)
    assert report["curves"]["step"] == [1, 2, 3, 4, 5, 6, 7, 8] and report["curves"]["tokens"][-1] == 192
    points = {p["step"]: p["accuracy"]["letters"] for p in report["evaluations"]}
    # In step 2 of the fixture's record (the second round's has no file of its own) and where each round ends.
    assert points == {0: 0.2, 2: 0.55, 4: 0.85, 6: 0.2, 8: 0.9}
    assert run.planned_steps == 8


def test_while_a_later_round_goes_on(root: Path) -> None:
    run = read_run(root)
    report = write_report(root)
    assert not run.finished and not (root / "report.json").exists()
    assert [r["finished"] for r in report["rounds"]] == [True, False]
    assert report["rounds"][1]["domains"] == {} and report["rounds"][1]["steps"] == 4
    page = (root / "report.html").read_text()
    assert "8 of 9 steps are done" in re.sub(r"\s+", " ", page)
    assert "not finished, 4 steps" in page and 'id="plot-rounds"' in page
    shutil.rmtree(root / "round-2")
    assert [r["finished"] for r in full_report(read_run(root))["rounds"]] == [True]


def test_the_page_shows_each_round(root: Path) -> None:
    finish(root)
    write_report(root)
    page = (root / "report.html").read_text()
    section = re.sub(r"\s+", " ", page[page.index('<section id="rounds">') : page.index('<section id="learning">')])
    assert "round 2" in section and 'data-domain="2"' in section
    rows = re.findall(r"<tr.*?</tr>", section)[1:]
    assert [re.findall(r">([^<>]+)</td>", row)[:2] for row in rows] == [
        [number, name]
        for number in ("1", "2")
        for name in ("mean, 4 steps, 96 tokens", "letters", "sums", "known")
    ]  # fmt: skip
    assert ">100.0 %" in rows[5] and ">80.0 %" in rows[6] and "-10.0 points" in rows[6]
    alone = write_report(root / "round-1")
    assert "rounds" not in alone
    assert 'id="rounds"' not in (root / "round-1" / "report.html").read_text()


@pytest.mark.parametrize("text", ["[]", "{", '{"rounds": [{}]}'])
def test_a_damaged_plan_is_named(root: Path, text: str) -> None:
    (root / "rounds.json").write_text(text)
    with pytest.raises(RunDirError, match=r"rounds\.json"):
        read_run(root)


def test_of_each_domain_the_last_that_has_it(root: Path) -> None:
    before, expert = (Evaluation.load(root / "round-1" / "evaluation" / f"{n}.json") for n in ("before", "expert"))
    letters = replace(expert, scores={"letters": expert.scores["letters"]}, answers=expert.answers[:2])
    found = combine_evaluations([before, letters], "both")
    assert found.model == "both" and found.accuracy == {"letters": 0.9, "sums": 0.5, "known": 0.9}
    assert {a.domain: a for a in found.answers}["letters"] == letters.answers[1] and len(found.answers) == 6
