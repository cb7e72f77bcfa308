"""`opd status`, `opd runs`, and what `opd merge` prints with `--quiet` and `--json`."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

import pipelines.commands.status
import pipelines.merging.run
from cli import app
from opd.errors import Paused, RunError
from opd.live.live_state import STOPPED
from opd.live.status import read_view
from opd.live.view import RUNNING
from tests.unit.opd.live.made import record
from tests.unit.opd.live.test_status import NOW, a_run
from tests.unit.sources import ROOT

REPORT = {
    "name": "two",
    "steps": 2,
    "wall_s": 8.0,
    "response_tokens": 100,
    "domains": {"reverse": {"before": 0.25, "after": 0.75, "expert": 1.0, "headroom": 2 / 3}},
    "mean_headroom": 2 / 3,
    "worst_headroom": 2 / 3,
    "curves": {"step": [1, 2], "tokens": [50, 100]},
}


def opd(*args: str | Path) -> Result:
    return CliRunner().invoke(app, [str(arg) for arg in args])


def lines(result: Result) -> list[dict[str, Any]]:
    return [json.loads(line) for line in result.stdout.splitlines()]


@pytest.fixture
def stopped(tmp_path: Path) -> Path:
    return a_run(tmp_path / "runs" / "two", now=replace(NOW, ended=STOPPED, why="stopped after step 12")).root


def test_status_of_a_run(stopped: Path) -> None:
    result = opd("status", stopped)
    assert (result.exit_code, result.stderr) == (0, "")
    assert "step 12 of 20" in result.stdout and "stopped after step 12" in result.stdout
    assert f"\nnext: opd merge --resume {stopped}   (goes on after step 10)\n" in result.stdout, "whole, to be copied"


def test_status_as_json(stopped: Path) -> None:
    (found,) = lines(opd("status", stopped, "--json"))
    assert (found["event"], found["state"], found["done"], found["steps"]) == ("status", STOPPED, 12, 20)
    assert found["domains"][0]["name"] == "math" and "losses" not in found


@pytest.mark.parametrize("form", ["", "--json"])
def test_watching_ends_with_the_merge(form: str, stopped: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    last = read_view(stopped)
    looks = iter([replace(last, state=RUNNING, done=done) for done in (11, 11, 12)] + [last])
    monkeypatch.setattr("opd.live.status.read_view", lambda root: next(looks))
    monkeypatch.setattr(pipelines.commands.status, "LOOK_S", 0.0)
    result = opd("status", stopped, "--watch", *form.split())
    if form:
        assert [(line["state"], line["done"]) for line in lines(result)] == [
            (RUNNING, 11),
            (RUNNING, 12),
            (STOPPED, 12),
        ]
    else:
        told = [line.partition("  ")[0] for line in result.stdout.splitlines()]
        assert told == ["running: step 11/20", "running: step 12/20", "stopped: step 12/20"]


def test_what_is_no_run_is_refused(tmp_path: Path) -> None:
    result = opd("status", tmp_path)
    assert result.exit_code == 2 and "a run directory of `opd merge`" in result.stderr
    result = opd("runs", tmp_path / "nowhere")
    assert result.exit_code == 2 and "no such directory" in result.stderr
    assert "no run in it" in opd("runs", tmp_path).stderr


def test_all_runs_are_a_table(stopped: Path) -> None:
    result = opd("runs", stopped.parent)
    assert result.exit_code == 0
    (row,) = [line for line in result.stdout.splitlines() if str(stopped) in line]
    assert [cell.strip() for cell in row.split("│")][2:5] == [STOPPED, "12/20", "8 %"]


@pytest.mark.parametrize("command", ["status", "runs"])
def test_a_look_imports_nothing_heavy(command: str, stopped: Path) -> None:
    told = "import atexit, sys; atexit.register(lambda: print('loaded:', *sorted(sys.modules)))\n"
    where = stopped if command == "status" else stopped.parent
    code = f"{told}import cli; sys.argv = ['opd', {command!r}, {str(where)!r}]; cli.app()"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, check=True, capture_output=True, timeout=60, text=True
    )
    loaded = {name.partition(".")[0] for name in done.stdout.rpartition("loaded:")[2].split()}
    assert loaded & {"torch", "ray", "vllm", "transformers", "matplotlib", "pyarrow", "numpy"} == set()
    assert "rich" in loaded


def merging(monkeypatch: pytest.MonkeyPatch, error: BaseException | None = None) -> None:
    """A merge of two steps in place of the real one; an error comes after the second."""

    def session(run: Any, *_: Any) -> dict[str, Any]:
        from opd.live.displays import RunStart

        with run.callbacks.display(RunStart("two", run.paths.root, 2)) as shown:
            shown.say("warning: look")
            for step in (1, 2):
                shown.step(record(step, ("reverse",)))
            if error:
                raise error
        return REPORT

    monkeypatch.setattr(pipelines.merging.run, "_run_session", session)


def test_a_quiet_merge_prints_its_result(world: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    merging(monkeypatch)
    world.write()
    result = opd("merge", "pipeline.yaml", "--quiet")
    assert (result.exit_code, result.stderr) == (0, "")
    assert "67 %" in result.stdout and "model: runs/two/model" in result.stdout


def test_a_merge_as_json_ends_with_its_result(world: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    merging(monkeypatch)
    world.write()
    result = opd("merge", "pipeline.yaml", "--json")
    assert result.exit_code == 0 and "warning: look" in result.stderr
    first, second, last = lines(result)
    assert [first["step"], second["step"], second["steps"]] == [1, 2, 2]
    where = {"run_dir": "runs/two", "model": "runs/two/model", "report": "runs/two/report.json"}
    reported = {key: value for key, value in REPORT.items() if key != "curves"}
    assert last == {"event": "result", "state": "finished"} | reported | where


@pytest.mark.parametrize(
    ("error", "state", "code"),
    [
        (Paused("step 2: look"), "paused", 4),
        (RunError("gone"), "failed", 1),
        (KeyboardInterrupt("Ctrl-C"), "stopped", 130),
    ],
)
def test_a_merge_as_json_says_how_it_ended(
    error: BaseException, state: str, code: int, world: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    merging(monkeypatch, error)
    world.write()
    result = opd("merge", "pipeline.yaml", "--json", "--quiet")
    assert result.exit_code == code and str(error) in result.stderr
    assert lines(result)[-1] == {"event": "result", "state": state, "error": str(error)}
    assert read_view(Path("runs/two")).state == state


def test_a_merge_that_is_refused_says_so_as_json(world: Any) -> None:
    world.data["trainer"]["step"] = 3
    world.write()
    result = opd("merge", "pipeline.yaml", "--json")
    (last,) = lines(result)
    assert result.exit_code == 2 and last["state"] == "refused" and "did you mean `steps`?" in last["error"]
