"""Writing one step ahead through the real engines: how old the tokens are, and a merge that is killed and resumed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

from opd.files import blake3_file
from tests.chaos import Merge, in_method, place_of_its_own
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


@pytest.mark.slow
def test_an_engine_that_dies_while_the_trainer_trains_writes_again_with_the_same_weights(
    tmp_path: Path, pipeline: dict[str, Any]
) -> None:
    """The trainer holds newer weights by the time when the death is noticed: the engine gets the files of the last push."""
    pipeline["schedule"] = {"mode": "one_step_off"}
    pipeline["rollout"] = {"max_new_tokens": 48, "max_model_len": 64}
    file = tmp_path / "pipeline.yaml"
    file.write_text(yaml.safe_dump(pipeline))
    opd("merge", file, "--run-dir", "whole", cwd=tmp_path)
    with place_of_its_own() as place:  # its path is short: Ray's sockets lie below it
        merge = Merge([file, "--run-dir", "hit"], place / "hit", place)
        deadline = time.monotonic() + 300
        while merge.records < 1:
            assert merge.driver.status() != psutil.STATUS_ZOMBIE, merge.errors.read_text()
            assert time.monotonic() < deadline
            time.sleep(0.05)
        merge.look()
        while (pid := in_method(merge, "engine", "generate")) is None:
            assert merge.records < 5 and time.monotonic() < deadline
        os.kill(pid, signal.SIGKILL)
        assert merge.wait(300) == 0, merge.errors.read_text()
        whole, hit = records(tmp_path / "whole"), records(place / "hit")
        models = [blake3_file(run / "model" / "model.safetensors") for run in (tmp_path / "whole", place / "hit")]
    assert [r["restarted"] for r in hit if "restarted" in r] == [["rollout worker 0"]]
    assert [r["loss"] for r in hit] == [r["loss"] for r in whole]
    assert models[0] == models[1]
