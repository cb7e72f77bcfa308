"""Merges from Python: what the functions hand on, and what they leave alone."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import opd
import pipelines
from opd.config import PipelineConfig
from opd.errors import ConfigError, OpdError, RunDirError
from opd.live.displays import RunStart
from opd.records.step import StepRecord
from opd.run.metrics import MetricsFile
from pipelines import MergeResult, load_pipeline, merge, register_expert, resume
from pipelines.merging import run as merging

ROOT = Path(__file__).parents[3]
DOMAINS = {"reverse": {"before": 0.25, "expert": 1.0, "after": 0.75}}
REPORT: dict[str, Any] = {"domains": DOMAINS, "mean_headroom": 2 / 3}


@pytest.fixture
def sessions(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Stands where workers would start: two steps, of which every sink is told, and a sentence."""
    seen: list[Any] = []

    def session(run: Any, checkpoint: Any, notices: Any, signals: Any) -> dict[str, Any]:
        seen.append((run, signals, signal.getsignal(signal.SIGINT)))
        with run.around.display(RunStart("two", run.paths.root, 2)) as shown:
            shown.say("going on")
            for step in (1, 2):
                record = StepRecord(step=step, loss=1 / step)
                MetricsFile(run.paths.metrics).write(record)
                shown.step(record)
                for sink in run.around.sinks:
                    sink.step(record)
        return REPORT

    monkeypatch.setattr(merging, "_run_session", session)
    return seen


def test_a_merge_is_quiet_and_takes_no_signal(world: Any, sessions: list[Any], capsys: Any) -> None:
    before = signal.getsignal(signal.SIGINT)
    losses: list[float] = []
    result = merge(world.write(), run_dir=world.root / "run", on_step=lambda record: losses.append(record.loss))
    assert isinstance(result, MergeResult) and losses == [1.0, 0.5]
    assert (result.before, result.expert, result.after) == ({"reverse": 0.25}, {"reverse": 1.0}, {"reverse": 0.75})
    assert result.mean_headroom == pytest.approx(2 / 3)
    assert result.model == world.root / "run" / "model" and [r.step for r in result.records] == [1, 2]
    assert sessions[0][2] is before and not sessions[0][1].should_leave()
    assert capsys.readouterr() == ("", "")


def test_what_is_asked_for_is_told_and_handled(world: Any, sessions: list[Any], capsys: Any) -> None:
    told: list[str] = []
    before = signal.getsignal(signal.SIGINT)
    merge(world.write(), run_dir=world.root / "one", tell=told.append, handle_signals=True)
    assert told == ["going on"] and capsys.readouterr().err == ""
    assert sessions[0][2] is not before and signal.getsignal(signal.SIGINT) is before
    merge(world.write(), run_dir=world.root / "two", progress=True)
    assert "going on" in capsys.readouterr().err


def test_a_merge_is_resumed_and_not_begun_twice(world: Any, sessions: list[Any]) -> None:
    merge(world.write(), run_dir=world.root / "run")
    with pytest.raises(RunDirError, match="exists"):
        merge(world.write(), run_dir=world.root / "run")
    steps: list[int] = []
    resume(world.root / "run", overrides=["trainer.steps=9"], on_step=lambda record: steps.append(record.step))
    assert steps == [1, 2] and sessions[1][0].config.trainer.steps == 9


def test_a_pipeline_is_data_a_file_or_a_name(world: Any) -> None:
    file = world.write()
    config = load_pipeline(file)
    assert isinstance(config, PipelineConfig)
    assert load_pipeline(world.data) == load_pipeline(str(file)) == load_pipeline(config) == config
    assert load_pipeline(world.data, ["trainer.steps=3"]).trainer.steps == 3
    assert load_pipeline("quickstart").name == "quickstart"
    with pytest.raises(ConfigError, match=r"trainer\.stepz"):
        load_pipeline(world.data | {"trainer": {"stepz": 3}})


def test_a_mistake_is_told_before_anything_is_written(world: Any, sessions: list[Any]) -> None:
    world.data["student"]["model"] = str(world.root / "nowhere")
    with pytest.raises(ValueError, match="nowhere"):
        merge(world.data, run_dir=world.root / "run")
    assert not (world.root / "run").exists() and sessions == []


def test_an_expert_is_registered(world: Any, expert_dirs: dict[str, Path]) -> None:
    made = register_expert("rev", expert_dirs["rev"], "reverse", registry=world.root / "registry")
    assert (made.name, made.domain) == ("rev", "reverse")
    stored = next((world.root / "registry").rglob("*.json"))
    assert json.loads(stored.read_text())["domain"] == "reverse"


def test_the_package_offers_names_without_importing_engines() -> None:
    assert set(pipelines.__all__) <= {name for name in pipelines.__all__ if callable(getattr(pipelines, name))}
    with pytest.raises(AttributeError, match="no attribute 'merges'"):
        _ = pipelines.merges
    code = "import pipelines, sys; assert not {'torch', 'ray', 'pipelines.api'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, timeout=60)
    for package in ("opd", "experts", "teachers", "pipelines"):
        assert (ROOT / package / "py.typed").is_file()


@pytest.mark.parametrize("packaged", [True, False])
def test_folders_of_the_users_with_our_packages_names_do_no_harm(packaged: bool, tmp_path: Path) -> None:
    """A notebook, like a program from standard input, searches its own directory first."""
    for name in ("pipelines", "experts", "teachers"):
        (tmp_path / name).mkdir()
        if packaged:
            (tmp_path / name / "__init__.py").write_text("raise SystemExit('the folder of the user was imported')\n")
    code = (
        "import opd\n"
        "made = opd.plan('quickstart')\n"
        "print(made.fits, opd.load_pipeline('quickstart').name, callable(opd.merge), callable(opd.check))\n"
        "import experts; print(experts.__file__)\n"
    )
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-"], input=code, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["True quickstart True True", str(ROOT / "experts" / "__init__.py")]


def test_a_package_of_anothers_that_was_imported_before_is_named(tmp_path: Path) -> None:
    (tmp_path / "experts.py").touch()
    code = "import experts, opd\ntry:\n    opd.merge\nexcept ImportError as error:\n    print(error)\n"
    env = os.environ | {"PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"}
    done = subprocess.run(
        [sys.executable, "-c", code], env=env, cwd=tmp_path, capture_output=True, text=True, timeout=60
    )
    assert "import opd and use it first" in done.stdout, done.stderr


def test_a_check_refuses_before_any_compute(world: Any) -> None:
    world.data["student"]["model"] = "nowhere"
    with pytest.raises(OpdError, match="nowhere"):
        opd.check(world.write())
    assert {"merge", "check", "plan"} <= set(dir(opd))
