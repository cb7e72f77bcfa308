"""Writing one step ahead through the real engines: how old the tokens are, and a merge that is killed and resumed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from opd.files import blake3_file
from tests.integration.test_merge import kill_when_logged, records

ROOT = Path(__file__).parents[2]


def opd(*args: object, cwd: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "cli", *map(str, args)],
        cwd=cwd,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_one_step_off_killed_and_resumed_ends_with_the_same_weights(tmp_path: Path, pipeline: dict[str, Any]) -> None:
    pipeline["schedule"] = {"mode": "one_step_off", "max_staleness": 1}
    file = tmp_path / "pipeline.yaml"
    file.write_text(yaml.safe_dump(pipeline))
    opd("merge", file, "--run-dir", "whole", cwd=tmp_path)
    kill_when_logged(file, tmp_path / "broken", 4)
    checkpoint = tmp_path / "broken" / "checkpoints" / "step-000002"
    assert (checkpoint / "written.arrow").exists(), "version 1 wrote the responses of step 3"
    opd("merge", "--resume", "broken", cwd=tmp_path)
    whole, broken = (records(tmp_path / name) for name in ("whole", "broken"))
    assert {3, 4} <= {r["step"] for r in broken if "replayed" in r}
    assert [set(r["token_ages"]) for r in whole] == [{"0"}] + [{"1"}] * 5
    assert [r["token_ages"] for r in broken] == [r["token_ages"] for r in whole]
    assert [r["loss"] for r in broken] == [r["loss"] for r in whole]
    assert whole[0]["drift"] == 0 < min(r["drift"] for r in whole[1:]), "the policy moved while it wrote"
    assert max(max(r["probe_gap"], r["logprob_gap"]) for r in whole) < 1e-3, "the weights that were pushed are right"
    assert all(r["busy_s"]["rollout"] > 0 for r in whole[:-1]) and whole[-1]["busy_s"]["rollout"] == 0
    ours, theirs = (blake3_file(tmp_path / name / "model" / "model.safetensors") for name in ("whole", "broken"))
    assert ours == theirs
    assert "How busy the roles were" in (tmp_path / "whole" / "report.html").read_text()
