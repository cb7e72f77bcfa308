"""A pipeline with a judge: what it reads of the rows, what is refused before there is a run, and what is kept for a resume."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from opd.config import load_pipeline
from opd.errors import ConfigError, PromptError, RunError
from opd.run.paths import RunPaths
from opd.verifiers.judge import RubricJudge
from pipelines.check.text_experts import measure_judges
from pipelines.evaluation.known_exams import KnownExams
from pipelines.inputs.read import read_inputs
from pipelines.merging import rounds
from pipelines.merging import run as merging
from pipelines.merging.changes import refused_keys
from tests.writer import Writer


@pytest.fixture
def judged(world: Any, writer: Writer, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The world with a judge of `upper`, whose rubric is a column of the rows; no merge comes as far as Ray."""

    def no_ray(*_: Any) -> None:
        raise RunError("it would start now")

    monkeypatch.setattr(merging, "ray_session", no_ray)
    for name in ("upper.jsonl", "upper-eval.jsonl"):
        add_rubrics(world.root / name)
    verifier = {
        "kind": "judge",
        "base_url": writer.url,
        "model": "wise",
        "rubric": "As {{ row.wish }}.",
        "server_timeout_s": 5,
    }
    world.data["domains"]["upper"]["eval"]["verifier"] = verifier
    world.data["objective"] = {"reward": {}}
    world.data["evaluate"] = {"samples": 3}
    writer.write = lambda text: '{"score": 8}'
    return world


def add_rubrics(file: Path) -> None:
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    lines = [json.dumps(row | {"wish": f"{row['answer']} or better"}) for row in rows]
    file.write_text("\n".join(lines) + "\n")


def verifier_of(world: Any) -> dict[str, Any]:
    found: dict[str, Any] = world.data["domains"]["upper"]["eval"]["verifier"]
    return found


@pytest.mark.parametrize("holdout", [False, True])
def test_rubrics_come_from_the_rows_of_prompts_and_of_exams(holdout: bool, judged: Any, writer: Writer) -> None:
    if holdout:
        judged.data["domains"]["upper"]["eval"] = {"holdout": 0.5, "verifier": verifier_of(judged)}
    inputs = read_inputs(load_pipeline(judged.write()))
    judge = inputs.exams["upper"].verifier
    assert isinstance(judge, RubricJudge) and judge.domain == "upper"
    for prompt in (inputs.prompts["upper"][0], inputs.exams["upper"].prompts[0]):
        assert prompt.columns == {"wish": f"{prompt.answer} or better"}
        assert judge.judge_answers([(prompt, "x")])[0].score == 0.8
        assert f"As {prompt.answer} or better." in writer.requests[-1]["messages"][0]["content"]
    assert inputs.prompts["reverse"][0].columns == {}
    assert not KnownExams(
        load_pipeline(judged.write()), inputs.student, inputs.exams, judged.root, print
    )._is_cacheable("upper")


def test_a_row_without_its_rubric_is_refused(judged: Any) -> None:
    (judged.root / "upper.jsonl").write_text('{"prompt": "upp q=", "answer": "Q"}\n')
    with pytest.raises(PromptError, match="no column `wish`, which the rubric of the judge reads"):
        read_inputs(load_pipeline(judged.write()))


@pytest.mark.parametrize(("max_calls", "said"), [(13, "13, and up to 4 responses and 9 answers in exams"), (14, "")])
def test_a_merge_that_may_need_more_calls_than_it_may_make_is_refused(max_calls: int, said: str, judged: Any) -> None:
    verifier_of(judged)["max_calls"] = max_calls
    config = load_pipeline(judged.write())
    if not said:
        read_inputs(config)
        return
    with pytest.raises(ConfigError) as error:
        read_inputs(config)
    assert str(error.value).startswith("domains.upper.eval.verifier.max_calls\n")
    assert said in str(error.value)


@pytest.mark.parametrize(
    ("status", "body", "said"),
    [(401, b"no", "the key is missing or wrong"), (503, b"", "status 503"), (200, {"model": "other", "choices": []}, "without one choice")],
)  # fmt: skip
def test_a_judge_that_gives_no_score_is_refused_before_there_is_a_run(
    status: int, body: Any, said: str, judged: Any, writer: Writer
) -> None:
    writer.spoil = lambda text, reply: (status, body)
    config = load_pipeline(judged.write())
    with pytest.raises(ConfigError) as refused:
        rounds.begin_rounds(config, judged.root / "runs" / "a", print)
    assert str(refused.value).startswith("domains.upper.eval.verifier\n") and said in str(refused.value)
    assert not list((judged.root / "runs").iterdir())
    with pytest.raises(ConfigError):
        list(measure_judges(read_inputs(config), print))


def test_the_first_score_is_kept_for_the_run_and_shown_by_a_check(judged: Any, writer: Writer) -> None:
    config = load_pipeline(judged.write())
    (line,) = measure_judges(read_inputs(config), print)
    assert line.startswith("upper: judge wise gives the row's own answer to upper/0 0.80, in ")
    root = judged.root / "run"
    work = rounds.begin_rounds(config, root, print)
    with pytest.raises(RunError, match="it would start now"):
        work.carry_out()
    (kept,) = [json.loads(line) for line in RunPaths(root).scores.read_text().splitlines() if line]
    assert kept["expert"] == "upper" and kept["prompt_id"].startswith("upper/0/") and len(writer.requests) == 2


def test_a_resume_may_change_limits_and_address_of_a_judge_and_not_its_rubric(judged: Any) -> None:
    before = load_pipeline(judged.write()).model_dump(mode="json")
    verifier_of(judged).update({"max_calls": 99, "max_cost": 3, "price": {"input": 1}, "server_timeout_s": 9})
    assert refused_keys(before, load_pipeline(judged.write()).model_dump(mode="json")) == []
    verifier_of(judged)["rubric"] = "Another."
    assert refused_keys(before, load_pipeline(judged.write()).model_dump(mode="json")) == [
        "domains.upper.eval.verifier.rubric"
    ]
