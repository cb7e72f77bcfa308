"""Help pages with examples, and what the shell offers when somebody presses Tab."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from cli import app
from pipelines.baselines.jobs import METHODS
from pipelines.commands import completion
from pipelines.commands.usage import UsageError
from tests.plain_models import plain_model_dir
from tests.unit.test_frictions import registered_expert

ROOT_COMMAND: Any = typer.main.get_command(app)


def leaves(command: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Every command that does something, with the words that lead to it."""
    for name, one in getattr(command, "commands", {}).items():
        if getattr(one, "commands", None):
            yield from leaves(one, (*path, name))
        else:
            yield (*path, name), one


COMMANDS = dict(leaves(ROOT_COMMAND))


@pytest.mark.parametrize("path", COMMANDS, ids=" ".join)
def test_a_help_page_has_examples_that_work(path: tuple[str, ...]) -> None:
    words, command = " ".join(("opd", *path)), COMMANDS[path]
    found = [line for line in (command.epilog or "").splitlines() if line.startswith(f"{words} ") or line == words]
    assert found, (
        f'give `{words}` an example: @app.command(epilog=examples("{words} ...")), of pipelines/commands/shell.py'
    )
    for example in found:
        line = example.partition(" > ")[0].removeprefix(words)
        try:
            command.make_context(words, shlex.split(line))
        except UsageError as error:
            pytest.fail(f"`{example}` is an example of `{words}`, which refuses it: {error}; correct its epilog")


def test_the_page_shows_each_example_on_a_line_of_its_own() -> None:
    shown = CliRunner().invoke(app, ["merge", "--help"], env={"COLUMNS": "100"}).stdout
    lines = [line.strip() for line in shown.splitlines()]
    assert "Examples:" in lines and "opd merge quickstart" in lines


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("OPD_REGISTRY", raising=False)
    return tmp_path


def test_pipelines_and_files_are_offered(here: Path) -> None:
    (here / "quiet.yaml").touch()
    (here / "quotes").mkdir()
    (here / "quiz.txt").touch()
    assert completion.complete_pipelines("qui") == ["quickstart", "quiet.yaml"]
    assert completion.complete_pipelines("quo") == ["quotes/"]
    assert completion.complete_shipped_pipelines("qui") == [
        "quickstart"
    ] and "rewards-at-once" in completion.complete_shipped_pipelines("")
    assert completion.complete_training_specs("quick") == ["quickstart-experts"]


def test_runs_are_offered_before_other_directories(here: Path) -> None:
    (here / "runs" / "mine").mkdir(parents=True)
    for name in ("pipeline.yaml", "manifest.json"):
        (here / "runs" / "mine" / name).touch()
    assert completion.complete_runs("") == ["runs/"] or completion.complete_runs("") == ["runs/mine", "runs/"]
    assert completion.complete_runs("runs/m") == ["runs/mine"]


def test_experts_are_offered(here: Path) -> None:
    assert completion.complete_experts("") == []
    registered_expert(here / "registry", plain_model_dir(here / "math"))
    assert completion.complete_experts("m") == ["math"] and completion.complete_experts("x") == []


def test_values_of_options_are_offered(here: Path) -> None:
    assert (
        completion.complete_settings("trainer.ste") == ["trainer.steps="]
        and completion.complete_settings("trainer.steps=1") == []
    )
    assert completion.complete_methods("linear,tie") == ["linear,ties"] and set(completion.METHODS) == set(METHODS)
    assert completion.complete_clusters("8") == ["8-gpus"] and "list" in completion.complete_clusters("")


@pytest.mark.parametrize(
    ("line", "offered"),
    [
        (["merge", "quickstart", "--set", "seed"], "seed="),
        (["plan", "quickstart", "--cluster", "8-"], "8-gpus"),
        (["compare", "quickstart", "--method", "slerp,ti"], "slerp,ties"),
        (["chat", "runs/mi"], "runs/mine"),
        (["serve", "runs/mi"], "runs/mine"),
        (["export", "runs/mi"], "runs/mine"),
    ],
)
def test_the_shell_is_answered_for_values(here: Path, line: list[str], offered: str) -> None:
    (here / "runs" / "mine").mkdir(parents=True)
    for name in ("pipeline.yaml", "manifest.json"):
        (here / "runs" / "mine" / name).touch()
    words = " ".join(["opd", *line])
    asked = {"_OPD_COMPLETE": "complete_bash", "COMP_WORDS": words, "COMP_CWORD": str(len(line))}
    assert CliRunner().invoke(app, [], prog_name="opd", env=asked).stdout.split() == [offered]


def test_the_shell_asks_and_is_answered(here: Path) -> None:
    asked = {"_OPD_COMPLETE": "complete_bash", "COMP_WORDS": "opd merge qui", "COMP_CWORD": "2"}
    found = CliRunner().invoke(app, [], prog_name="opd", env=asked)
    assert found.stdout.split() == ["quickstart"]
