"""The GPU check, tried out on the CPU: every part that needs no GPU runs, and the figures that must be right are."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow  # what it runs on tiny sizes has tests of its own
def test_every_part_runs_on_tiny_sizes(tmp_path: Path) -> None:
    parts = ("engines", "push", "merge", "trainer", "scorer")
    command = [sys.executable, "-m", "benchmarks.gpu_check", "--output", str(tmp_path), "--device", "cpu", "--quick"]
    done = subprocess.run(
        [*command, "--minutes", "9", "--parts", *parts],
        cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=600, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    record = json.loads((tmp_path / "gpu.json").read_text())
    assert {name: part["error"] for name, part in record["parts"].items()} == dict.fromkeys(parts), done.stderr
    tables = {name: part["tables"] for name, part in record["parts"].items()}
    steps = tables["trainer"]["tiny, float32, against plain torch in float64 on the CPU"]
    assert len(steps) == 5 and max(step["loss_difference"] for step in steps) < 1e-5
    assert max(step["grad_norm_difference"] for step in steps) < 1e-5
    assert steps[-1]["loss"] < 0.9 * steps[0]["loss"]
    assert all(row["bit_equal"] for row in tables["trainer"]["resume"])
    assert all(row["last_loss"] < row["first_loss"] for row in tables["trainer"]["speed, bfloat16"])
    assert all(row["logprob_difference"] <= 1e-4 for row in tables["scorer"]["float32 against the CPU"])
    assert [row["bit_equal"] for row in tables["scorer"]["divided teacher, float32"]] == [True]
    assert all(row["probe_gap"] < 1e-4 and row["sampled_gap"] < 1e-4 for row in tables["engines"]["weight push"])
    pushes = tables["push"]["weight push"]
    assert [row["way"] for row in pushes] == ["shared_memory", "network", "direct"]
    assert all(row["probe_gap"] < 0.15 and row["GB_per_s"] > 0 for row in pushes)
    assert {row["phase"] for row in tables["merge"]["seconds of a step, median"]} >= {"rollout", "train", "sync"}
    page = (tmp_path / "gpu.md").read_text()
    assert "| device | CPU, not a GPU |" in page and "they are a GPU's" in page
