"""`opd environments`: prompts files, and a game at the terminal."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from cli import app
from opd.environments import ENVIRONMENTS
from opd.errors import ConfigError
from opd.prompts import read_prompt_lines
from pipelines import environments


def opd(*arguments: str) -> tuple[int, str]:
    done = CliRunner().invoke(app, ["environments", *arguments])
    return done.exit_code, done.output


def test_every_environment_is_listed_with_its_tools() -> None:
    code, told = opd("list")
    assert code == 0 and all(name in told for name in ENVIRONMENTS)
    assert "shell, write_file" in told and "calculate" in told


@pytest.mark.parametrize("name", ["maze", "calculator", "lookup", "boxes", "sandbox", "retry"])
def test_tasks_are_a_prompts_file(name: str, tmp_path: Path) -> None:
    output = tmp_path / "new" / "tasks.jsonl"
    code, told = opd("tasks", name, "--n", "7", "--seed", "3", "--output", str(output))
    assert (code, told) == (0, f"{name}: 7 tasks in {output}\n")
    lines = list(read_prompt_lines(output))
    assert len(lines) == 7 and all(line.metadata and line.answer for line in lines)
    before = output.read_bytes()
    opd("tasks", name, "--n", "7", "--seed", "3", "--output", str(output))
    assert output.read_bytes() == before


def test_options_are_those_of_the_environment(tmp_path: Path) -> None:
    output = tmp_path / "tasks.jsonl"
    code, _ = opd("tasks", "maze", "--n", "2", "--output", str(output), "--set", "size=8", "--set", "form=chat")
    assert code == 0 and len(next(iter(read_prompt_lines(output))).metadata["cells"]) == 8
    for option, found in (
        ("sise=8", "did you mean `size`"),
        ("size=99", "environment maze: size"),
        ("size", "no key=value"),
    ):
        code, told = opd("tasks", "maze", "--output", str(tmp_path / "no.jsonl"), "--set", option)
        assert code == 2 and found in told
    code, told = opd("tasks", "mase", "--output", str(tmp_path / "no.jsonl"))
    assert code == 2 and "did you mean `maze`" in told
    assert not (tmp_path / "no.jsonl").exists()


def test_a_class_without_tasks_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="a class without `tasks`"):
        environments.write_tasks("opd.records.environments:Tool", 1, 0, [], tmp_path / "x")


def test_playing_needs_a_terminal() -> None:
    code, told = opd("play", "maze")
    assert code == 2 and "no terminal" in told


def test_a_person_plays_to_the_end() -> None:
    row = environments._make_tasks("hanoi", 1, 4, [])[0]
    turns, said = iter(["hm", *row["answer"].split()]), list[str]()
    assert environments.play_task("hanoi", 4, [], lambda _: next(turns), said.append) == 1
    assert said[0] == row["prompt"] and said[1].startswith("no, ab ac")


def test_a_person_may_leave_and_may_call_tools() -> None:
    turns = iter(["calculate 1+1", "calculate {}", 'calculate {"expression": "2+2"}', "calculate {", "quit"])
    said: list[str] = []
    assert environments.play_task("calculator", 0, ["form=chat"], lambda _: next(turns), said.append) is None
    assert said[1] == "2" and "needs expression" in said[2] and said[3] == "4" and "cannot be made" in said[4]
