"""`opd traces`: episodes that exams kept, readable and harmless on a terminal."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from cli import app
from opd.records.scores import Evaluation, ScoredAnswer


def answer(
    domain: str, number: int, turns: int | None = 2, text: str = "policy: n\nenvironment: a wall"
) -> ScoredAnswer:
    return ScoredAnswer(
        domain=domain, prompt_id=f"{domain}/{number}", prompt="go:", answer="", text=text, score=0.5, tokens=7, turns=turns,
        invalid_calls=number,
    )  # fmt: skip


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    (tmp_path / "evaluation").mkdir()
    for name in ("before", "step-000003", "step-000012"):
        kept = [
            *(answer("maze", n) for n in range(3)),
            answer("cave", 0, text=f"policy: {name} \x1b[2J"),
            answer("sums", 0, None),
        ]
        Evaluation(model=name, scores={}, answers=tuple(kept)).save(tmp_path / "evaluation" / f"{name}.json")
    return tmp_path


def traces(*args: object) -> tuple[int, str]:
    done = CliRunner().invoke(app, ["traces", *map(str, args)])
    return done.exit_code, done.output


def test_the_newest_exam_of_the_student_is_shown_turn_by_turn(run_dir: Path) -> None:
    code, out = traces(run_dir)
    assert code == 0
    assert "== maze/1: score 0.50, 2 turns, 7 tokens, 1 invalid calls\ngo:\npolicy: n\nenvironment: a wall" in out
    assert "step-000012" in out and "sums" not in out, "an answer is no episode"
    assert "\x1b" not in out and "\\x1b[2J" in out


def test_one_exam_one_domain_and_few(run_dir: Path) -> None:
    _, out = traces(run_dir, "--exam", "before", "--domain", "cave", "--domain", "maze", "--limit", 1)
    assert out.count("== ") == 2 and "policy: before" in out and "maze/1" not in out


@pytest.mark.parametrize(
    ("args", "told"),
    [
        (["--domain", "sums"], "no episode of sums"),
        (["--exam", "after"], "before, step-000003, step-000012"),
    ],
)
def test_what_is_not_there_is_told(run_dir: Path, args: list[str], told: str) -> None:
    code, out = traces(run_dir, *args)
    assert code == 2 and told in out and "fix:" in out


@pytest.mark.parametrize("name", ["matrix", "lm-eval"])
def test_what_is_no_exam_is_not_offered_and_not_read(run_dir: Path, name: str) -> None:
    (run_dir / "evaluation" / f"{name}.json").write_text('{"format": 1, "models": {}, "own": {}}')
    code, out = traces(run_dir, "--exam", name)
    assert code == 2 and "found:  before, step-000003, step-000012\n" in out and f"the exam '{name}'" in out


def test_a_run_without_an_exam(tmp_path: Path) -> None:
    code, out = traces(tmp_path)
    assert code == 2 and "no exam" in out
