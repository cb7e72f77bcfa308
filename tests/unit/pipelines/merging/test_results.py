"""Results say what they are of, and a merge that goes on takes back those of its past."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from opd.config import load_pipeline
from opd.live.interfaces import Display
from opd.records.scores import DomainScore, Evaluation, combine_evaluations
from opd.run.paths import RunPaths
from pipelines.evaluation.lm_eval import lm_eval_text
from pipelines.inputs.read import as_teacher, read_inputs
from pipelines.merging.results import add_model_digest, read_progress, withdraw_results
from pipelines.merging.run import MergeRun, _take_starting_exams
from tests.exams import Measuring

SCORE = DomainScore(accuracy=0.5, stderr=0.1, low=0.3, high=0.7, questions=6)


def exam(model: str = "merged", **more: Any) -> Evaluation:
    return replace(Evaluation(model=model, scores={"reverse": SCORE, "upper": SCORE}), **more)


def write_records(paths: RunPaths, steps: int) -> None:
    paths.evaluation.mkdir(parents=True, exist_ok=True)
    lines = [json.dumps({"step": i + 1, "response_tokens": 10, "phase_s": {"train": 1.0}}) for i in range(steps)]
    paths.metrics.write_text("".join(line + "\n" for line in lines))


def names(paths: RunPaths) -> list[str]:
    return sorted(file.name for file in paths.evaluation.iterdir())


@pytest.fixture
def ended(tmp_path: Path) -> RunPaths:
    """Leave what a merge of 20 steps leaves, as far as results go."""
    paths = RunPaths(tmp_path / "run")
    write_records(paths, 20)
    for name in ("before", "expert"):
        exam(name).save(paths.evaluation / f"{name}.json")
    for step in (10, 20):
        exam(f"step {step}", step=step).save(paths.evaluation / f"step-{step:06d}.json")
    (paths.evaluation / "step-000020.json").unlink()
    exam(step=20, tokens=200).save(paths.evaluation / "after.json")
    scores = {"gsm8k": {"acc": 0.5}}
    paths.lm_eval.write_text(
        lm_eval_text({"student before": scores, "merged": scores}, {"student before": "s", "merged": "m"})
    )
    paths.pipeline.write_text("name: two\ntrainer: {steps: 40}\n")
    stored = dict.fromkeys(("wall_s", "response_tokens", "response_tokens_per_s"), 0)
    stored |= {"name": "two", "steps": 20, "domains": {}, "phase_s": {}, "versions": {}}
    paths.report.write_text(json.dumps(stored))
    return paths


def test_a_merge_that_goes_on_has_no_end_any_more(ended: RunPaths, monkeypatch: pytest.MonkeyPatch) -> None:
    pages: list[Path] = []
    monkeypatch.setattr("pipelines.merging.results.write_report", lambda root: pages.append(root) or {})
    withdraw_results(ended, 20, 40)
    assert names(ended) == ["before.json", "expert.json", "lm-eval.json", "step-000010.json", "step-000020.json"]
    assert Evaluation.load(ended.evaluation / "step-000020.json") == exam(step=20, tokens=200), "a point on its way"
    assert not ended.report.exists() and pages == [ended.root]
    data = json.loads(ended.lm_eval.read_text())
    assert (set(data["models"]), data["weights"]) == ({"student before"}, {"student before": "s"})
    withdraw_results(ended, 20, 40)  # killed, and resumed
    assert pages == [ended.root]


def test_what_monitors_saw_in_steps_that_are_taken_again_is_of_the_past(
    ended: RunPaths, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pipelines.merging.results.write_report", lambda root: {})
    ended.monitors.mkdir()
    for step in (7, 10, 20):
        ended.alarms_file(step).write_text("{}")
    withdraw_results(ended, 10, 20)
    assert list(ended.alarms_by_step()) == [7, 10]


def test_what_an_older_release_measured_is_of_the_steps_in_its_report(
    ended: RunPaths, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pipelines.merging.results.write_report", lambda root: {})
    exam().save(ended.evaluation / "after.json")
    withdraw_results(ended, 20, 40)
    assert Evaluation.load(ended.evaluation / "step-000020.json").step == 20


def test_a_merge_that_goes_back_forgets_what_came_later(ended: RunPaths, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pipelines.merging.results.write_report", lambda root: {})
    withdraw_results(ended, 5, 20)
    assert names(ended) == ["before.json", "expert.json", "lm-eval.json"]


def test_a_finished_merge_keeps_everything(ended: RunPaths) -> None:
    before = {file: file.read_bytes() for file in ended.root.rglob("*") if file.is_file()}
    withdraw_results(ended, 20, 20)
    assert {file: file.read_bytes() for file in ended.root.rglob("*") if file.is_file()} == before


def test_the_exam_of_a_merged_model_says_what_it_is_of(
    ended: RunPaths, tiny_model_dir: Path, expert_dirs: dict[str, Path]
) -> None:
    found = add_model_digest(exam(), tiny_model_dir, *read_progress(ended.metrics))
    assert (found.step, found.tokens, set(found.weights)) == (20, 200, {"reverse", "upper"})
    other = add_model_digest(exam(), expert_dirs["up"], 20, 200)
    assert not set(found.weights.values()) & set(other.weights.values())
    found.save(ended.evaluation / "after.json")
    assert Evaluation.load(ended.evaluation / "after.json") == found


def test_of_several_exams_each_domain_keeps_its_model() -> None:
    first = exam(step=20, tokens=200, weights={"reverse": "a", "upper": "a"})
    other = Evaluation(model="x", scores={"upper": SCORE}, step=0, tokens=0, weights={"upper": "b"})
    found = combine_evaluations([first, other], "both")
    assert (found.step, found.tokens, found.weights) == (None, None, {"reverse": "a", "upper": "b"})
    assert combine_evaluations([first, first], "both").step == 20


def test_student_and_experts_are_measured_again_if_the_file_is_of_others(world: Any) -> None:
    config = load_pipeline(world.write())
    paths = RunPaths(world.root / "run")
    paths.root.mkdir()
    run = MergeRun(config=config, inputs=read_inputs(config), paths=paths, identity={})
    shown = Display()

    def measure() -> list[str]:
        parts: Any = Measuring(paths, shown)
        _take_starting_exams(parts, run, shown, {})
        exams: list[str] = parts.exams
        return exams

    assert measure() == ["student before: reverse, upper", "expert rev: reverse", "expert up: upper"]
    before, expert = (Evaluation.load(paths.evaluation / f"{name}.json") for name in ("before", "expert"))
    student = as_teacher("s", run.inputs.student, None).digest
    assert (before.step, before.tokens, before.weights) == (0, 0, {"reverse": student, "upper": student})
    assert expert.weights == {
        "reverse": run.inputs.teachers["reverse"].digest,
        "upper": run.inputs.teachers["upper"].digest,
    }
    assert measure() == []
    replace(expert, weights=expert.weights | {"upper": "another's"}).save(paths.evaluation / "expert.json")
    assert measure() == ["expert up: upper"]
    replace(before, weights={}).save(paths.evaluation / "before.json")  # as an older release wrote it
    assert measure() == []
