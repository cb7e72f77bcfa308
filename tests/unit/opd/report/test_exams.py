"""Exams of agents in report.json, on the page and on the terminal: episodes, and success by the length of the task."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from opd.evaluation.lengths import by_length
from opd.records.scores import Evaluation, LengthScore
from opd.report import full_report, length_rows, read_run, write_report
from opd.report.figures import draw_by_length as plot_by_length
from pipelines.commands.report import LENGTH_COLUMNS
from tests.unit.opd.report.conftest import AFTER, BEFORE, EXPERT, HOSTILE, evaluation
from tests.unit.opd.report.test_page import Page, written

RIGHT = {"before": (9, 1), "after": (10, 5), "expert": (10, 8)}
"""Exam -> tasks that it got right: of ten with 2 moves, and of ten with 20."""
ACCURACY = {"before": BEFORE, "after": AFTER, "expert": EXPERT}


def parts(short: int, long: int) -> tuple[LengthScore, ...]:
    tasks = [(2, [float(i < short)]) for i in range(10)] + [(20, [float(i < long)]) for i in range(10)]
    return by_length(tasks)


def played(found: Evaluation, domain: str, turns: float, by: tuple[LengthScore, ...] = ()) -> Evaluation:
    score = replace(found.scores[domain], turns=turns, invalid_calls=3, by_length=by)
    return replace(found, scores={**found.scores, domain: score})


def add_exams(run_dir: Path, domain: str = "letters", old: tuple[str, ...] = ()) -> Path:
    """Make `domain` one of agents in all three exams; those in `old` are files of before there were lengths."""
    for number, (name, accuracy) in enumerate(ACCURACY.items(), 1):
        found = evaluation(name, accuracy if domain in accuracy else {**accuracy, domain: 0.5})
        exam: dict[str, Any] = json.loads(played(found, domain, 4.0 * number, parts(*RIGHT[name])).as_text())
        if name in old:
            for score in exam["scores"].values():
                del score["by_length"]
        (run_dir / "evaluation" / f"{name}.json").write_text(json.dumps(exam))
    return run_dir


def test_the_json_has_each_group_of_tasks_for_all_three(run_dir: Path) -> None:
    write_report(add_exams(run_dir))
    found = json.loads((run_dir / "report.json").read_text())
    short, long = found["by_length"]["letters"]
    assert set(found["by_length"]) == {"letters"}
    assert [short[key] for key in ("fewest", "most", "questions", "before", "after", "expert")] == [1, 3, 10, 0.9, 1, 1]
    assert [long[key] for key in ("fewest", "most", "questions", "before", "after", "expert")] == [
        15, None, 10, 0.1, 0.5, 0.8,
    ]  # fmt: skip
    # scipy.stats.binomtest(5, 10).proportion_ci(method="wilson")
    assert long["after_interval"] == pytest.approx([0.2365931, 0.7634069], abs=1e-6)
    assert found["answers"]["letters"]["after"]["turns"] == 8.0
    assert found["answers"]["letters"]["after"]["invalid_calls"] == 3
    assert "turns" not in found["answers"]["sums"]["after"]


@pytest.mark.usefixtures("no_plots")
def test_old_files_are_shown_as_before(run_dir: Path) -> None:
    _, page = written(add_exams(run_dir, old=("before", "after", "expert")))
    found = json.loads((run_dir / "report.json").read_text())
    assert "by_length" not in found and length_rows(found) == []
    assert "agent-exams" in page.ids() and "by-length" not in page.ids()
    assert found["answers"]["letters"]["before"]["turns"] == 4.0


def test_an_old_exam_beside_new_ones_leaves_its_cells_empty(run_dir: Path) -> None:
    found = full_report(read_run(add_exams(run_dir, old=("before",))))
    assert [group["before"] for group in found["by_length"]["letters"]] == [None, None]
    assert length_rows(found) == [
        ("letters", "1-3", "10", "-", "1.00 (0.72 to 1.00)", "1.00 (0.72 to 1.00)"),
        ("letters", "15 and more", "10", "-", "0.80 (0.49 to 0.94)", "0.50 (0.24 to 0.76)"),
    ]
    assert all(len(row) == len(LENGTH_COLUMNS) for row in length_rows(found))


def test_the_page_of_a_run_without_agents_has_neither(whole_page: Path) -> None:
    page = Page(whole_page.read_text(encoding="utf-8"))
    assert not {"agent-exams", "by-length"} & set(page.ids())


def test_the_page_shows_episodes_and_lengths(run_dir: Path) -> None:
    _, page = written(add_exams(run_dir))
    assert {"agent-exams", "by-length", "plot-by-length-0"} <= set(page.ids())
    cells = page.cells
    start = cells.index("broken") + 1
    assert [cell.strip() for cell in cells[start : start + 8]] == [
        "letters", "student before", "20.0 %13.3 to 28.9 %", "100", "4.0", "7.5", "3", "0",
    ]  # fmt: skip
    at = cells.index("15 and more")
    assert [cell.strip() for cell in cells[at : at + 5]] == [
        "15 and more", "10", "10.0 %1.8 to 40.4 %", "50.0 %23.7 to 76.3 %", "80.0 %49.0 to 94.3 %",
    ]  # fmt: skip


def test_a_merge_that_goes_on_shows_the_last_exam_so_far(run_dir: Path) -> None:
    add_exams(run_dir)
    for name in ("report.json", "evaluation/after.json"):
        (run_dir / name).unlink()
    step = played(evaluation("step 2", {**BEFORE, "letters": 0.55}), "letters", 6.0, parts(10, 3))
    step.save(run_dir / "evaluation" / "step-000002.json")
    assert full_report(read_run(run_dir))["by_length"]["letters"][1]["after"] == 0.3


def test_experts_are_left_out_of_a_run_without_teachers(run_dir: Path) -> None:
    add_exams(run_dir)
    (run_dir / "evaluation" / "expert.json").unlink()
    (run_dir / "pipeline.yaml").write_text("{name: alone, experts: {}, trainer: {steps: 4}}")
    groups = full_report(read_run(run_dir))["by_length"]["letters"]
    assert [(group["after"], group["expert"], group["expert_interval"]) for group in groups] == [
        (1.0, None, None),
        (0.5, None, None),
    ]
    plot = plot_by_length("by-length-0", "letters", groups)
    assert [label for _, label in plot.legend] == ["student before", "merged"]


def test_names_of_domains_stay_text(run_dir: Path) -> None:
    name = HOSTILE.replace("\ud800", "")
    text, page = written(add_exams(run_dir, domain=name))
    assert [tag for tag, _ in page.elements].count("script") == 1 and "title='owned'</script>" not in text
    assert "plot-by-length-0" in page.ids()


def test_one_length_alone_is_a_row_and_no_plot(run_dir: Path) -> None:
    add_exams(run_dir)
    for name in ACCURACY:
        path = run_dir / "evaluation" / f"{name}.json"
        found = Evaluation.load(path)
        played(found, "letters", 2.0, found.scores["letters"].by_length[:1]).save(path)
    _, page = written(run_dir)
    assert "by-length" in page.ids() and "plot-by-length-0" not in page.ids()


def test_a_damaged_group_is_told_with_its_file(run_dir: Path) -> None:
    from opd.errors import RunDirError

    path = add_exams(run_dir) / "evaluation" / "after.json"
    data = json.loads(path.read_text())
    data["scores"]["letters"]["by_length"] = [{"fewest": 1}]
    path.write_text(json.dumps(data))
    with pytest.raises(RunDirError, match=r"after.json(?s:.*)move it away"):
        read_run(run_dir)


def test_the_matrix_keeps_groups(run_dir: Path) -> None:
    model = asdict(played(evaluation("merged", AFTER), "letters", 2.0, parts(1, 1)))
    (run_dir / "evaluation" / "matrix.json").write_text(json.dumps({"format": 1, "models": {"merged": model}}))
    assert read_run(run_dir).matrix["merged"].scores["letters"].by_length == parts(1, 1)
