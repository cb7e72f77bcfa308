"""report.json: other tools read it, so its keys and its arithmetic are fixed."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from opd.errors import RunDirError
from opd.records.step import StepRecord
from opd.records.sums import sum_by_key
from opd.records.texts import TextSpending
from opd.report import Gate, build_report, domain_rows, full_report, read_run, recovered_share
from opd.report.exams import latest_exam
from opd.report.page import render_page
from opd.report.summary import POINTS, compute_curves
from opd.run.paths import MERGE_EVALUATIONS
from tests.unit.opd.report.conftest import AFTER, BEFORE, EXPERT, evaluation


@pytest.mark.parametrize(
    ("before", "after", "expert", "share"),
    [
        (0.2, 0.8, 1.0, 0.75),
        (0.2, 0.2, 1.0, 0.0),
        (0.2, 1.0, 1.0, 1.0),
        (0.5, 0.25, 1.0, -0.5),
        (0.0, 1.0, 0.5, 2.0),
        (0.5, 0.9, 0.5, None),
        (0.9, 0.9, 0.5, None),
    ],
)
def test_headroom(before: float, after: float, expert: float, share: float | None) -> None:
    assert recovered_share(before, after, expert) == (None if share is None else pytest.approx(share))


def report(**changes: Any) -> dict[str, Any]:
    values: dict[str, Any] = {
        "name": "two",
        "exams": {
            "before": {"a": 0.2, "b": 0.5, "c": 0.9},
            "expert": {"a": 1.0, "b": 1.0, "c": 0.8},
            "after": {"a": 0.6, "b": 1.0, "c": 0.9},
        },
        "records": [
            StepRecord(step=1, response_tokens=100, phase_s={"rollout": 1.0, "train": 2.0}),
            StepRecord(step=2, response_tokens=50, phase_s={"rollout": 1.0, "checkpoint": 1.0}),
        ],
        "wall_s": 12.345,
        "versions": {"torch": "2"},
    }
    return build_report(**values | changes)


def test_the_keys_are_a_contract() -> None:
    found = report()
    assert set(found) == {
        "name",
        "steps",
        "domains",
        "mean_headroom",
        "worst_headroom",
        "wall_s",
        "phase_s",
        "response_tokens",
        "response_tokens_per_s",
        "versions",
    }
    assert all(set(d) == {"before", "after", "expert", "headroom"} for d in found["domains"].values())
    assert json.loads(json.dumps(found)) == found


def test_the_numbers() -> None:
    found = report()
    assert (found["name"], found["steps"], found["wall_s"]) == ("two", 2, 12.3)
    assert found["domains"]["a"] == {"before": 0.2, "after": 0.6, "expert": 1.0, "headroom": pytest.approx(0.5)}
    assert found["domains"]["c"]["headroom"] is None
    assert found["mean_headroom"] == pytest.approx(0.75)
    assert found["worst_headroom"] == pytest.approx(0.5)
    assert found["phase_s"] == {"rollout": 2.0, "train": 2.0, "checkpoint": 1.0}
    assert (found["response_tokens"], found["response_tokens_per_s"]) == (150, 30.0)


def test_what_judges_took_is_that_of_the_run_with_its_exams(run_dir: Path) -> None:
    """The last step's record knows nothing of the last exam, and nothing at all where a judge only marks exams."""
    whole = TextSpending(calls=9, failed=1, prompt_tokens=900, completion_tokens=90, cost=1.5)
    assert "judges" not in report(judges={}) and report(judges={"a": whole})["judges"] == {"a": asdict(whole)}
    stored = json.loads((run_dir / "report.json").read_text())
    (run_dir / "report.json").write_text(json.dumps(stored | {"judges": {"letters": asdict(whole)}}))
    assert full_report(read_run(run_dir))["judges"] == {"letters": asdict(whole)}


def test_spending_of_rounds_is_added_up() -> None:
    one, other = TextSpending(calls=2, cost=0.5), TextSpending(calls=3, failed=1, cost=0.25)
    assert sum_by_key([{"a": one, "b": one}, {"a": other}, {}]) == {
        "a": TextSpending(calls=5, failed=1, cost=0.75),
        "b": one,
    }


def test_nothing_to_recover_is_null() -> None:
    found = report(exams={name: {"a": 1.0} for name in MERGE_EVALUATIONS})
    assert found["mean_headroom"] is None
    assert found["worst_headroom"] is None


def test_a_run_without_exams_and_records() -> None:
    found = report(exams={name: {} for name in MERGE_EVALUATIONS}, records=[])
    assert (found["domains"], found["mean_headroom"], found["response_tokens_per_s"]) == ({}, None, 0.0)
    assert domain_rows(found) == []


def test_the_table_has_a_row_a_domain_and_the_means() -> None:
    rows = domain_rows(report())
    assert rows[0] == ("a", "0.20", "1.00", "0.60", "50 %")
    assert rows[2][-1] == "-"
    assert rows[-1] == ("mean", "0.53", "0.93", "0.83", "75 %")


def test_what_the_files_of_a_run_tell(run_dir: Path) -> None:
    found = full_report(read_run(run_dir))
    letters, known = found["domains"]["letters"], found["domains"]["known"]
    assert letters["headroom"] == pytest.approx(0.65 / 0.7)
    assert letters["regression"] == pytest.approx(-0.65)
    assert letters["before_interval"][0] < 0.2 < letters["before_interval"][1]
    assert known["headroom"] is None and known["headroom_interval"] is None
    assert known["regression"] == pytest.approx(0.05)
    assert known["regression_interval"][0] < 0 < known["regression_interval"][1]
    assert found["mean_headroom"] == pytest.approx((0.65 / 0.7 + 1) / 2)
    low, high = found["mean_headroom_interval"]
    assert 0.85 < low < found["mean_headroom"] < high < 1.1
    assert (found["steps"], found["wall_s"], found["response_tokens"]) == (4, 75.0, 96)
    assert found["command"].startswith("opd merge three.yaml")
    assert found["models"]["student"]["parameters"] == 1234567
    assert found["answers"]["sums"]["after"] == {"questions": 100, "mean_tokens": 7.5, "truncated": 0.02, "failed": 0}
    assert (found["truncated"], found["quarantined"], found["largest_probe_gap"]) == (0.25, 0, 4e-6)
    assert json.loads(json.dumps(found)) == found


def test_evaluations_against_steps_and_tokens(run_dir: Path) -> None:
    points = full_report(read_run(run_dir))["evaluations"]
    assert [(p["step"], p["tokens"]) for p in points] == [(0, 0), (2, 48), (4, 96)]
    assert points[1]["accuracy"]["letters"] == 0.55, "the evaluation's file, not the record"
    assert points[1]["mean_headroom"] == pytest.approx(0.25), "half of letters, nothing of sums"
    assert [("mean_headroom_interval" in p) for p in points] == [False, True, True]


def test_baselines_over_their_seeds(run_dir: Path) -> None:
    ties, off_policy = full_report(read_run(run_dir))["baselines"]
    assert off_policy["label"] == "off-policy" and (off_policy["seeds"], off_policy["tokens"]) == (2, 128)
    assert off_policy["mean_headroom"] == pytest.approx((0.25 / 0.7 + 0.35 / 0.7) / 4)
    assert off_policy["interval"] == pytest.approx([0.125 / 0.7, 0.175 / 0.7])
    assert off_policy["accuracy"]["letters"] == pytest.approx(0.5)
    assert ties["seeds"] == 1 and ties["token_share"] is None
    assert ties["mean_headroom"] == pytest.approx(0.25)
    assert ties["interval"][0] < 0.25 < ties["interval"][1]


def test_curves_are_means_over_neighbouring_steps() -> None:
    records = [
        {
            "step": step,
            "domains": {
                "a": {"loss": float(step), "tokens": 10 * step, "samples": 5},
                "b": {"tokens": 0, "samples": 0},
            },
            "positions": {"4-7": {"loss": 1.0, "tokens": 1}, "0": {"loss": float(step), "tokens": step}},
            "response_tokens": 10 * step,
            "truncated": 1,
            "phase_s": {"train": 0.5},
        }
        for step in range(1, 2 * POINTS)  # an odd number: the last point is one step
    ]
    found = compute_curves([StepRecord.from_json(record) for record in records])
    assert len(found["step"]) == POINTS and found["step"][:2] == [2, 4] and found["step"][-1] == 2 * POINTS - 1
    assert found["tokens"][:2] == [30, 100]
    assert found["loss"]["a"][0] == pytest.approx((1 * 10 + 2 * 20) / 30), "weighted by tokens"
    assert found["loss"]["b"] == [None] * POINTS and found["student_entropy"]["a"] == [None] * POINTS
    assert found["length"]["a"][:2] == [pytest.approx(3.0), pytest.approx(7.0)]
    assert list(found["positions"]) == ["0", "4-7"]
    assert found["positions"]["0"][0] == pytest.approx((1 + 4) / 3)
    assert found["truncated"][0] == pytest.approx(0.2)
    assert found["tokens_per_s"][0] == pytest.approx(30.0)


def test_the_share_of_each_domain_in_samples_and_tokens() -> None:
    def record(step: int, tokens: int, **more: Any) -> dict[str, Any]:
        domains = {"long": {"tokens": tokens, "samples": 2}, "short": {"tokens": 10, "samples": 2}}
        return {"step": step, "domains": domains} | more

    records = [
        record(1, 30, prompts={"long": 3, "short": 1}),  # a prompt of `long` without room was left out
        record(2, 10),  # of an older release: the responses that were trained
        record(3, 90, prompts={"long": 1, "short": 4}),
        {"step": 4, "skipped": True},
    ]
    found = compute_curves([StepRecord.from_json(record) for record in records])
    assert found["sample_share"] == {"long": [0.75, 0.5, 0.2, None], "short": [0.25, 0.5, 0.8, None]}
    assert found["token_share"] == {"long": [0.75, 0.5, 0.9, None], "short": [0.25, 0.5, 0.1, None]}


def test_a_report_without_evaluation_files(run_dir: Path) -> None:
    for name in ("evaluation", "baselines"):
        shutil.rmtree(run_dir / name)
    found = full_report(read_run(run_dir))
    assert found["domains"]["letters"] == {
        "before": 0.2, "after": 0.85, "expert": 0.9, "headroom": pytest.approx(0.65 / 0.7),
        "regression": pytest.approx(-0.65),
    }  # fmt: skip
    assert not {"mean_headroom_interval", "answers", "baselines"} & set(found)
    assert [p["step"] for p in found["evaluations"]] == [2]


def test_a_merge_that_goes_on(run_dir: Path) -> None:
    (run_dir / "report.json").unlink()
    (run_dir / "evaluation" / "after.json").unlink()
    found = full_report(read_run(run_dir))
    assert (found["name"], found["steps"], found["wall_s"]) == ("three", 4, 8.0)
    assert found["domains"]["letters"]["after"] == 0.55, "of the last evaluation"
    assert (
        found["domains"]["letters"]["headroom_interval"][0] < 0.5 < found["domains"]["letters"]["headroom_interval"][1]
    )
    (run_dir / "evaluation" / "step-000002.json").unlink()
    (run_dir / "metrics.jsonl").write_text("")
    found = full_report(read_run(run_dir))
    assert (found["domains"], found["steps"]) == ({}, 0), "the student before the merge is no result of it"


def test_an_exam_whose_step_has_no_record_yet_does_not_count(run_dir: Path) -> None:
    for name in ("report.json", "evaluation/after.json"):
        (run_dir / name).unlink()
    evaluation("step 5", AFTER).save(run_dir / "evaluation" / "step-000005.json")  # a kill before its record
    found = full_report(read_run(run_dir))
    low, high = found["domains"]["letters"]["after_interval"]
    assert low < found["domains"]["letters"]["after"] == 0.55 < high, "number and interval are of one exam"
    assert found["unfinished"].endswith("the last evaluation so far, after step 2")


def test_without_the_last_exams_file_no_earlier_one_stands_for_it(run_dir: Path) -> None:
    (run_dir / "evaluation" / "after.json").unlink()
    run = read_run(run_dir)
    found = full_report(run)
    assert found["domains"]["letters"]["after"] == 0.85, "of the stored report; the exam after step 2 had 0.55"
    assert "after_interval" not in found["domains"]["letters"] and "mean_headroom_interval" not in found
    assert latest_exam(run) is None, "nor are its answers those of the merged model"


def test_an_exam_that_only_the_records_have_is_an_evaluation_too(run_dir: Path) -> None:
    for name in ("report.json", "evaluation/after.json", "evaluation/step-000002.json"):
        (run_dir / name).unlink()
    found = full_report(read_run(run_dir))
    assert found["domains"]["letters"]["after"] == 0.2
    assert found["unfinished"].endswith("the last evaluation so far, after step 2")


def test_without_records_the_merged_model_is_not_taken_for_the_start(run_dir: Path) -> None:
    (run_dir / "metrics.jsonl").unlink()
    found = full_report(read_run(run_dir))
    assert [(p["step"], p["accuracy"]) for p in found["evaluations"]] == [(0, BEFORE)]
    assert found["domains"]["letters"]["after"] == 0.85


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("report.json", "{", "report.json"),
        ("report.json", '{"name": "three"}', "no steps, domains"),
        ("metrics.jsonl", '{"step": 1}}\n', "metrics.jsonl"),
        ("report.json", "5", "no name, steps"),
        ("metrics.jsonl", '{"step": 1, "domains": []}\n', "metrics.jsonl"),
        ("manifest.json", "[1]", "manifest.json"),
        ("pipeline.yaml", "a: [", "pipeline.yaml"),
        ("pipeline.yaml", "a: !!bool x", "'x' is no bool"),
        ("pipeline.yaml", "", "no mapping"),
        ("pipeline.yaml", "- a\n", "no mapping"),
        ("evaluation/after.json", '{"format": 2}', "format 2"),
        ("evaluation/before.json", '{"format": 1, "model": "m", "answers": []}', "'scores'"),
        ("evaluation/matrix.json", '{"format": 1}', "models"),
        ("evaluation/step-000002.json", "[]", "format None"),
        ("baselines/x.json", '{"format": 1, "method": "ties", "scores": {}}', "'label'"),
    ],
)
def test_a_damaged_file_is_named(run_dir: Path, name: str, text: str, words: str) -> None:
    (run_dir / name).write_text(text)
    with pytest.raises(RunDirError, match=words) as error:
        full_report(read_run(run_dir))
    assert str(run_dir / name) in str(error.value)


def test_no_run_directory(tmp_path: Path) -> None:
    with pytest.raises(RunDirError, match=r"neither pipeline\.yaml nor report\.json"):
        read_run(tmp_path)


def test_without_experts_there_is_what_was_gained_and_no_headroom() -> None:
    found = report(exams={"before": {"a": 0.2, "b": 0.5}, "expert": {}, "after": {"a": 0.6, "b": 1.0}})
    assert found["domains"]["a"] == {"before": 0.2, "after": 0.6, "expert": None, "headroom": None}
    assert found["mean_headroom"] is None and found["worst_headroom"] is None
    assert domain_rows(found) == [
        ("a", "0.20", "-", "0.60", "-"),
        ("b", "0.50", "-", "1.00", "-"),
        ("mean", "0.35", "-", "0.80", "-"),
    ]


def test_an_expert_that_is_better_by_one_question_decides_nothing(run_dir: Path) -> None:
    """The merge recovers none of `letters`; in `sums` it is nine questions above a start that is one below its expert."""
    accuracies = {
        "before": {"letters": 0.2, "sums": 0.5, "known": 0.9},
        "expert": {"letters": 0.9, "sums": 0.51, "known": 0.8},
        "after": {"letters": 0.2, "sums": 0.6, "known": 0.9},
    }
    for name, accuracy in accuracies.items():
        evaluation(name, accuracy).save(run_dir / "evaluation" / f"{name}.json")
    found = full_report(read_run(run_dir))
    assert found["domains"]["sums"]["headroom"] is None and found["domains"]["sums"]["headroom_interval"] is None
    assert found["mean_headroom"] == found["worst_headroom"] == 0.0
    low, high = found["mean_headroom_interval"]
    assert low < 0 < high < 0.5
    verdict = Gate(min_headroom=0.5).verdict(found)
    assert [failure.split(":")[0] for failure in verdict["failures"]] == ["letters"]
    assert verdict["without_headroom"] == ["sums", "known"]
    assert Gate(max_regression=0.1).verdict(found)["without_headroom"] == []


def test_an_interval_of_the_mean_is_of_the_domains_that_have_one(run_dir: Path) -> None:
    everything = full_report(read_run(run_dir))
    evaluation("expert", {"letters": 0.9, "sums": 0.51, "known": 0.8}).save(run_dir / "evaluation" / "expert.json")
    found = full_report(read_run(run_dir))
    assert found["mean_headroom"] == found["domains"]["letters"]["headroom"] != everything["mean_headroom"]
    assert found["mean_headroom_interval"] == pytest.approx(found["domains"]["letters"]["headroom_interval"])


def leaves(data: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The way to each value, and to each mapping and list on the way; of a list to its first two."""
    yield path
    parts = data.items() if isinstance(data, dict) else enumerate(data[:2]) if isinstance(data, list) else ()
    for key, value in parts:
        yield from leaves(value, (*path, key))


def put_at(data: Any, path: tuple[Any, ...], value: Any) -> Any:
    if not path:
        return value
    changed = json.loads(json.dumps(data))
    inner = changed
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = value
    return changed


@pytest.mark.parametrize(
    "name",
    ["report.json", "manifest.json", "metrics.jsonl", "evaluation/after.json", "evaluation/matrix.json", "baselines"],
)
@pytest.mark.usefixtures("no_plots")
def test_a_value_of_a_wrong_type_is_shown_or_named_and_no_traceback(run_dir: Path, name: str) -> None:
    file = next((run_dir / name).glob("*.json")) if name == "baselines" else run_dir / name
    text = file.read_text()
    lines = text.splitlines() if name == "metrics.jsonl" else [text]
    data, refused = json.loads(lines[0]), 0
    for path in leaves(data):
        for value in ("x", None, [], {"a": 1}):
            file.write_text("\n".join([json.dumps(put_at(data, path, value)), *lines[1:], ""]))
            try:
                run = read_run(run_dir)
                render_page(full_report(run), run)
            except RunDirError as error:
                refused += str(file) in str(error)
    assert refused > 0


def test_a_domain_whose_expert_takes_no_exam_has_no_headroom(run_dir: Path) -> None:
    stored = json.loads((run_dir / "report.json").read_text())
    stored["domains"]["letters"]["expert"] = None
    (run_dir / "report.json").write_text(json.dumps(stored))
    evaluation("expert", {d: a for d, a in EXPERT.items() if d != "letters"}).save(
        run_dir / "evaluation" / "expert.json"
    )
    run = read_run(run_dir)
    report = full_report(run)
    assert "letters" in render_page(report, run)
    letters, others = report["domains"].pop("letters"), report["domains"]
    assert letters["expert_interval"] is None and letters["headroom_interval"] is None
    assert letters["before_interval"] is not None and letters["after_interval"] is not None
    assert all(values["expert_interval"] is not None for values in others.values())
