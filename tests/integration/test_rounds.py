"""Two rounds through `opd`: the second starts from what the first left, and measures nothing twice."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file

from opd.records.scores import Evaluation

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_two_rounds(tmp_path: Path, pipeline: dict[str, Any]) -> None:
    # Untrained models are never right: a score that depends on every letter tells models apart.
    (tmp_path / "judge.py").write_text(
        "def vowels(text, answer, metadata):\n    return sum(map(text.count, 'aeiou')) / 8\n"
    )
    for domain in pipeline["domains"].values():
        domain["eval"]["verifier"] = {"kind": "python", "function": "judge:vowels"}
    pipeline["trainer"]["steps"] = 2
    pipeline["rounds"] = 2
    (tmp_path / "pipeline.yaml").write_text(yaml.safe_dump(pipeline))
    done = subprocess.run(
        [sys.executable, "-m", "cli", "merge", "pipeline.yaml", "--run-dir", "run"],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("before the merge") == 1 and done.stderr.count("expert left:") == 1, done.stderr
    run = tmp_path / "run"
    first, second, last = (
        load_file(path / "model" / "model.safetensors") for path in (run / "round-1", run / "round-2", run)
    )
    assert all(torch.equal(second[name], last[name]) for name in last)
    assert any(not torch.equal(first[name], second[name]) for name in first)
    assert not (run / "round-1" / "checkpoints").exists()

    report = json.loads((run / "report.json").read_text())
    assert [r["finished"] for r in report["rounds"]] == [True, True] and report["steps"] == 4
    stored = {
        f"{path.parent.parent.name}/{path.stem}": Evaluation.load(path).accuracy
        for path in run.glob("round-*/evaluation/*.json")
    }
    assert stored["round-2/before"] == stored["round-1/after"]
    assert stored["round-2/expert"] == stored["round-1/expert"]
    for domain, values in report["domains"].items():
        assert values["before"] == stored["round-1/before"][domain]
        assert values["after"] == stored["round-2/after"][domain]

    judged = subprocess.run(
        [sys.executable, "-m", "cli", "evaluate", "run/model", "--json"],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert judged.returncode == 0, judged.stderr
    assert json.loads(judged.stdout)["accuracy"] == stored["round-2/after"]
