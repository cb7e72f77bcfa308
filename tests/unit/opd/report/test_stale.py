"""Results measured on another stand of a merge are marked, in the report, on the page and in its JSON."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from opd.records.scores import Evaluation
from opd.report import baseline_rows, full_report, read_run, write_report
from tests.unit.opd.report.conftest import AFTER, BEFORE, EXPERT, baseline, evaluation, put, record


def bind(root: Path, merged: str = "m20", step: int = 4) -> None:
    """Exams and matrix of the fixture as this release writes them; `merged` stands for a digest."""
    digests = {"before": "s", "expert": "e"}
    for name, digest in digests.items():
        file = root / "evaluation" / f"{name}.json"
        found = Evaluation.load(file)
        replace(found, weights=dict.fromkeys(found.scores, digest)).save(file)
    file = root / "evaluation" / "after.json"
    found = Evaluation.load(file)
    replace(found, step=step, tokens=24 * step, weights=dict.fromkeys(found.scores, merged)).save(file)
    of = {"student before": ("s", BEFORE), "expert": ("e", EXPERT), "merged": (merged, AFTER)}
    models = {
        name: asdict(replace(evaluation(name, found), weights=dict.fromkeys(found, digest)))
        for name, (digest, found) in of.items()
    }
    models["merged"] |= {"step": step}
    put(root / "evaluation" / "matrix.json", {"format": 1, "models": models})


def train_on(root: Path, steps: int, planned: int) -> None:
    """As a resume with more steps: records and the pipeline's key."""
    (root / "metrics.jsonl").write_text("".join(json.dumps(record(i + 1)) + "\n" for i in range(steps)))
    (root / "pipeline.yaml").write_text(yaml.safe_dump({"name": "three", "trainer": {"steps": planned}}))


def finish(root: Path, merged: str, steps: int) -> None:
    """As the end of that resume."""
    train_on(root, steps, steps)
    found = evaluation("merged", EXPERT)
    weights = dict.fromkeys(found.scores, merged)
    replace(found, step=steps, tokens=24 * steps, weights=weights).save(root / "evaluation" / "after.json")
    stored = json.loads((root / "report.json").read_text())
    put(root / "report.json", stored | {"steps": steps, "response_tokens": 24 * steps})


def test_results_of_the_merge_as_it_stands_are_not_marked(run_dir: Path) -> None:
    bind(run_dir)
    report = full_report(read_run(run_dir))
    assert "stale" not in report and "unfinished" not in report
    assert [row["stale"] for row in report["baselines"]] == [None, None]


def test_after_more_steps_what_was_measured_before_is_out_of_date(run_dir: Path) -> None:
    bind(run_dir)
    finish(run_dir, "m40", 8)
    report = full_report(read_run(run_dir))
    by_method = {row["method"]: row["stale"] for row in report["baselines"]}
    assert by_method == {
        "off_policy": "measured beside 4 steps and 96 tokens of the merge, which has 8 and 192 now",
        "ties": None,  # no part in the merge's steps
    }
    (first, other_seed, second) = report["stale"]
    assert "--share 0.3 --seed 1` measures it again" in other_seed
    assert first.startswith("off-policy: measured beside 4 steps")
    assert f"`opd baseline {run_dir} --method off_policy --share 0.3` measures it again" in first
    assert second.startswith("evaluation/matrix.json: “merged” was measured at step 4 of 8; `opd evaluate --matrix")
    rows = {row[0]: row for row in baseline_rows(report)}
    assert (rows["off-policy"][-1], rows["TIES 0.5"][-1], rows["this merge"][-1]) == ("stale", "", "")


def test_a_command_can_be_copied_whatever_the_directory_is_called(run_dir: Path) -> None:
    bind(run_dir)
    finish(run_dir, "m40", 8)
    spaced = run_dir.rename(run_dir.with_name("my run"))
    lines = full_report(read_run(spaced))["stale"]
    assert f"`opd evaluate --matrix '{spaced}'` measures it again" in lines[-1]


def test_the_page_says_so_and_leaves_it_out_of_the_figures(run_dir: Path) -> None:
    bind(run_dir)
    finish(run_dir, "m40", 8)
    write_report(run_dir)
    page = (run_dir / "report.html").read_text()
    figures = page[page.index('id="plot-methods"') :]
    figures = figures[: figures.index("</figure>")]
    assert "TIES 0.5" in figures and "off-policy," not in figures
    assert 'id="stale"' in page and "measured beside 4 steps and 96 tokens" in page
    assert "merged (out of date)" in page
    assert json.loads((run_dir / "report.json").read_text())["stale"]


def test_baselines_that_are_all_out_of_date_are_still_listed(run_dir: Path) -> None:
    bind(run_dir)
    (run_dir / "baselines" / "ties-None-0.json").unlink()
    finish(run_dir, "m40", 8)
    write_report(run_dir)
    page = (run_dir / "report.html").read_text()
    assert 'id="plot-methods"' not in page and "off-policy, 30 % of the tokens" in page


def test_the_same_steps_once_more_on_other_weights(run_dir: Path) -> None:
    """As after a resume from step 2 with another number of ranks."""
    bind(run_dir)
    found = Evaluation.load(run_dir / "evaluation" / "after.json")
    replace(found, weights=dict.fromkeys(found.scores, "other")).save(run_dir / "evaluation" / "after.json")
    (line,) = full_report(read_run(run_dir))["stale"]
    assert "“merged” was measured at step 4 of 4" in line


def test_an_expert_that_was_another_model_when_the_matrix_was_made(run_dir: Path) -> None:
    bind(run_dir)
    found = Evaluation.load(run_dir / "evaluation" / "expert.json")
    replace(found, weights=dict.fromkeys(found.scores, "another")).save(run_dir / "evaluation" / "expert.json")
    (line,) = full_report(read_run(run_dir))["stale"]
    assert "student or experts were other models" in line


def test_what_an_older_release_measured_is_not_vouched_for(run_dir: Path) -> None:
    scores = dict.fromkeys(BEFORE, 0.5)
    more: dict[str, Any] = {"merge_steps": None, "merge_tokens": None}
    baseline(run_dir, "mixed_sft", "Mixed SFT", scores, token_share=1.0, tokens=90, seed=0, **more)
    lines = full_report(read_run(run_dir))["stale"]
    assert [line.partition(":")[0] for line in lines] == ["Mixed SFT", "evaluation/matrix.json"]
    assert all("an older release measured it and did not record" in line for line in lines)


# Merges that go on


def test_a_merge_that_goes_on_after_its_end_is_not_finished(run_dir: Path) -> None:
    """An older release leaves report.json and after.json of the earlier end in place."""
    train_on(run_dir, 6, 8)
    run = read_run(run_dir)
    assert not run.finished and run.after is None
    report = full_report(run)
    assert report["unfinished"] == (
        "6 of 8 steps are done; what stands under “merged” is the last evaluation so far, after step 4"
    )
    assert {p["step"]: p["accuracy"]["letters"] for p in report["evaluations"]} == {0: 0.2, 2: 0.55, 4: 0.85}
    assert report["domains"]["letters"]["after"] == 0.85 and report["steps"] == 6
    kept = (run_dir / "report.json").read_bytes()
    write_report(run_dir)
    assert "6 of 8 steps are done" in (run_dir / "report.html").read_text()
    assert (run_dir / "report.json").read_bytes() == kept, "of the earlier end"


def test_a_merge_that_went_back_has_lost_its_end(run_dir: Path) -> None:
    train_on(run_dir, 3, 4)
    report = full_report(read_run(run_dir))
    assert report["unfinished"].startswith("3 of 4 steps are done; ") and report["unfinished"].endswith("after step 2")
    assert report["domains"]["letters"]["after"] == 0.55


@pytest.mark.parametrize("steps", [0, 1])
def test_a_merge_without_an_evaluation(run_dir: Path, steps: int) -> None:
    for name in ("report.json", "evaluation/after.json", "evaluation/step-000002.json"):
        (run_dir / name).unlink()
    train_on(run_dir, steps, 8)
    report = full_report(read_run(run_dir))
    assert report["unfinished"] == f"{steps} of 8 steps are done; there has been no evaluation yet"


def test_all_steps_done_and_no_exam_of_the_end(run_dir: Path) -> None:
    (run_dir / "report.json").unlink()
    assert full_report(read_run(run_dir))["unfinished"].startswith(
        "4 of 4 steps are done, the model or its exam is miss"
    )
