"""The output of the commands around results, and their end when a signal stops them."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

import pipelines.baselines.comparison
import pipelines.baselines.run
import pipelines.evaluation.command
from cli import app
from opd.evaluation.evaluator import MERGED
from pipelines.evaluation.command import EvaluateOptions, EvaluateOutput
from pipelines.interrupts import Interrupted
from tests.unit.opd.report.conftest import build_run

ROOT = Path(__file__).parents[2]
HOSTILE = "domain \x1b]0;owned\x07 \u202e says 0.5"
SPELT = "domain \\x1b]0;owned\\x07 \\u202e says 0.5"


def opd(*args: str | Path) -> Result:
    return CliRunner().invoke(app, [str(a) for a in args])


# The table of a merge


def test_report_shows_baselines_and_what_is_out_of_date(tmp_path: Path) -> None:
    root = build_run(tmp_path / "run")
    result = opd("report", root)
    lines = [line.replace(" ", "") for line in result.stdout.splitlines()]
    assert "│thismerge│1│96│1│96%││" in lines and "│off-policy│0.3│128│2│21%││" in lines
    assert lines.index("│TIES0.5│-│-│1│25%││") < lines.index("│off-policy│0.3│128│2│21%││"), "the best first"
    file = root / "baselines" / "off_policy-0.3-0.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "merge_steps": 2, "merge_tokens": 48}))
    result = opd("report", root)
    assert "│off-policy│0.3│128│2│21%│stale│" in [line.replace(" ", "") for line in result.stdout.splitlines()]
    assert "out of date: off-policy: measured beside 2 steps and 48 tokens of the merge, which has 4 and 96 now" in (
        result.stderr
    )
    markdown = opd("report", root, "--markdown")
    assert "| off-policy | 0.3 | 128 | 2 | 21 % | stale |" in markdown.stdout.splitlines()
    assert "out of date: off-policy" in markdown.stderr


def test_report_says_that_a_merge_is_not_finished(tmp_path: Path) -> None:
    root = build_run(tmp_path / "run")
    assert "not finished" not in opd("report", root).output
    (root / "pipeline.yaml").write_text("name: three\ntrainer: {steps: 9}\n")
    result = opd("report", root)
    assert result.exit_code == 0
    assert (
        "not finished: 4 of 9 steps are done; what stands under “merged” is the last evaluation so far" in result.stderr
    )
    assert "not finished" in opd("report", root, "--markdown").stderr


# What was measured, and what may not be read


def test_a_full_disk_costs_the_file_and_not_the_table(world: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", "scores.json")

    found = EvaluateOutput({"models": {}}, [("measured", ("model", "a"), [("m", "0.75")])])
    monkeypatch.setattr(pipelines.evaluation.command, "run_evaluation", lambda options, tell: found)
    monkeypatch.setattr("opd.files.atomic_write_text", full)
    result = opd("evaluate", "up", "--output", "scores.json")
    assert result.exit_code == 3 and "0.75" in result.stdout and "scores.json" in result.stderr


def test_settings_of_public_tasks_need_a_pipeline(world: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without one nobody would read them, and the whole task would be run."""
    monkeypatch.setattr("opd.evaluation.harness.run_tasks", lambda *_: pytest.fail("the harness was begun"))
    for more in (["--set", "evaluate.lm_eval.limit=5"], ["--domains", "a"]):
        result = opd("evaluate", "up", "--lm-eval", "gsm8k", *more)
        assert result.exit_code == 2 and result.stderr.startswith(f"error: {more[0]}\n  found:  no pipeline"), (
            result.output
        )


def test_a_file_that_may_not_be_read_is_bad_input(world: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    weights, may = world.root / "base" / "model.safetensors", os.access

    def closed(*_: Any) -> Any:
        raise PermissionError(errno.EACCES, "Permission denied", str(weights))

    monkeypatch.setattr(pipelines.evaluation.command, "run_evaluation", closed)
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path) != weights and may(path, mode))
    result = opd("evaluate", "up")
    assert result.exit_code == 2 and "may not read" in result.stderr, result.output


# Text from others


def test_progress_of_evaluate_is_spelt_out(world: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def evaluate(options: EvaluateOptions, tell: Any) -> EvaluateOutput:
        tell(HOSTILE)
        return EvaluateOutput({"models": {MERGED: {}}}, [])

    monkeypatch.setattr(pipelines.evaluation.command, "run_evaluation", evaluate)
    for arguments in (["evaluate", "up"], ["evaluate", "--matrix", "pipeline.yaml"]):
        result = opd(*arguments)
        assert result.exit_code == 0 and result.stderr == SPELT + "\n"


def test_progress_of_baseline_and_compare_is_spelt_out(world: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def compute(jobs: Any, tell: Any, keep_models: bool) -> Any:
        tell(HOSTILE)
        return []

    def compare(config: Any, root: Any, seeds: Any, methods: Any, shares: Any, tell: Any) -> Any:
        tell(HOSTILE)
        return []

    monkeypatch.setattr(pipelines.baselines.run, "compute_results", compute)
    monkeypatch.setattr(pipelines.baselines.comparison, "run_comparison", compare)
    for arguments in (["baseline", "pipeline.yaml", "--method", "linear"], ["compare", "pipeline.yaml"]):
        result = opd(*arguments)
        assert result.exit_code == 0 and result.stderr == SPELT + "\n", result.output


# Signals


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_that_stops_a_merge_inside_is_in_the_exit_code(
    number: int, code: int, world: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stopped(*_: Any) -> Any:
        raise Interrupted(5, Path("runs/two"), number)

    monkeypatch.setattr(pipelines.baselines.run, "compute_results", stopped)
    monkeypatch.setattr(pipelines.baselines.comparison, "run_comparison", stopped)
    for arguments in (["baseline", "pipeline.yaml", "--method", "opd"], ["compare", "pipeline.yaml"]):
        result = opd(*arguments)
        assert result.exit_code == code, result.output
        assert "the same command" in result.stderr


COMMAND = """
import sys, time
import pipelines.merging.run
from cli import app
from pipelines.interrupts import Interrupted


def steps(run, checkpoint, notices, signals):
    with signals.handle_first_signal(print):
        print("a step", flush=True)
        while not signals.should_leave():
            time.sleep(0.05)
    raise Interrupted(1, run.paths.root, signals.number)


pipelines.merging.run._run_session = steps
sys.argv[0] = "opd"
app()
"""


@pytest.mark.parametrize("command", ["baseline", "compare"])
def test_sigterm_ends_a_command_with_143(command: str, world: Any) -> None:
    """A merge inside the command that takes steps until it is asked to stop; all else is the command itself."""
    arguments = {"baseline": ["--method", "opd"], "compare": ["--method", "opd", "--seeds", "0", "--share", "1"]}[
        command
    ]
    process = subprocess.Popen(
        [sys.executable, "-c", COMMAND, command, "pipeline.yaml", *arguments],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=world.root,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    try:
        assert process.stdout is not None
        while process.stdout.readline() != "a step\n":
            assert process.poll() is None, process.stderr and process.stderr.read()
        process.send_signal(signal.SIGTERM)
        began = time.monotonic()
        _, errors = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 143, errors
    assert "the same command" in errors and time.monotonic() - began < 60
