"""A merge with an expert that loops: real engines, and a monitor that ends it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from safetensors.torch import load_file, save_file

ROOT = Path(__file__).parents[2]
LETTER_A = 4
"""Token id."""


def opd(*args: object, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "cli", *map(str, args)],
        cwd=cwd,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=500,
    )


def make_it_loop(model_dir: Path) -> None:
    """Whatever stands before, the model says `a`: all embeddings share a direction, and the head of `a` lies in it."""
    file = model_dir / "model.safetensors"
    tensors = load_file(file)
    tensors["model.embed_tokens.weight"][:, 0] = 8.0
    tensors["lm_head.weight"] *= 0.1
    tensors["lm_head.weight"][LETTER_A, 0] = 3.0
    save_file(tensors, file, {"format": "pt"})


def records(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture
def looping(tmp_path: Path, make_pipeline: Callable[..., dict[str, Any]], make_model_dir: Callable[..., Path]) -> Path:
    """A pipeline file: the expert of one of its two domains loops."""
    data = make_pipeline(tmp_path, make_model_dir, tie=False)
    make_it_loop(Path(data["experts"]["left"]["model"]))
    data["rollout"]["max_new_tokens"] = 24
    data["trainer"] |= {"ranks": 1, "steps": 40, "lr": 5.0e-3}
    data["checkpoint"] = {"every": 100}
    (tmp_path / "pipeline.yaml").write_text(yaml.safe_dump(data))
    return tmp_path / "pipeline.yaml"


def stopped_merge(file: Path, run: Path) -> subprocess.CompletedProcess[str]:
    """A merge that its monitor stops."""
    stopped = opd("merge", file, "--run-dir", run, cwd=file.parent)
    assert stopped.returncode == 1, stopped.stderr
    return stopped


def test_a_teacher_that_loops_is_stopped_with_its_samples_in_the_report(looping: Path) -> None:
    run = looping.with_name("run")
    stopped = stopped_merge(looping, run)
    steps = records(run)
    last = steps[-1]["step"]
    assert 5 <= last <= 20 and len(steps) == last
    assert f"failed: step {last}: monitor repetition: domain left-domain: " in stopped.stderr
    assert "warning: step" in stopped.stderr, "told before it stopped"
    assert f"opd merge --resume {run} --set monitors.repetition.stop=null" in stopped.stderr
    assert [p.name for p in (run / "checkpoints").iterdir()] == [f"step-{last:06d}"]
    assert not (run / "model").exists() and not (run / "report.json").exists()
    ended = [alarm for alarm in steps[-1]["alarms"] if alarm["action"] == "stop"]
    assert "left-domain" in {alarm["domain"] for alarm in ended}

    seen = json.loads((run / "monitors" / f"step-{last:06d}.json").read_text())
    samples = [s for s in seen["samples"] if s["domain"] == "left-domain"]
    assert samples and all(s["response"].count("a") > 12 and s["prompt"].startswith("lef ") for s in samples)
    page = (run / "report.html").read_text()
    assert f"Stopped by a monitor after step {last}:" in page and samples[0]["response"] in page


@pytest.mark.slow  # the same merge, and a resume; tests/unit/opd/monitors has what a resume reads
def test_a_stopped_merge_goes_on_once_the_limit_is_lifted(looping: Path) -> None:
    run = looping.with_name("run")
    stopped_merge(looping, run)
    steps = records(run)
    last = steps[-1]["step"]
    on = ("--set", "monitors.repetition.stop=null", "--set", f"trainer.steps={last + 1}")
    resumed = opd("merge", "--resume", run, *on, cwd=looping.parent)
    assert resumed.returncode == 0, resumed.stderr
    assert [r["step"] for r in records(run)] == list(range(1, last + 2)) and records(run)[:last] == steps
    report = json.loads((run / "report.json").read_text())
    told = {(a["domain"], a["action"], a["from_step"]) for a in report["alarms"] if a["signal"] == "repetition"}
    assert ("left-domain", "stop", last) in told and ("left-domain", "warn", last + 1) in told
