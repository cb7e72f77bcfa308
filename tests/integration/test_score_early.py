"""Scoring while the student still writes, through the real engines, killed and resumed; `test_agents.py` has it with episodes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from opd.files import blake3_file
from tests.integration.test_agents import scored_early
from tests.integration.test_merge import kill_when_logged, opd, records, write


@pytest.mark.slow  # three starts; test_agents.py has one, with episodes
def test_killed_and_resumed_it_ends_with_the_same_weights(tmp_path: Path, pipeline: dict[str, Any]) -> None:
    pipeline["schedule"] = {"score_early": 4}
    pipeline["rollout"] = {"max_new_tokens": 40, "max_model_len": 64, "workers": 2}
    pipeline["teachers"] = {"workers": 2}
    pipeline["trainer"] |= {"ranks": 1, "steps": 3}
    file = write(tmp_path, pipeline)
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    done = opd("merge", file, "--run-dir", whole, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    kill_when_logged(file, broken, 1)
    done = opd("merge", "--resume", broken, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert any(map(scored_early, records(whole)))
    assert [r["loss"] for r in records(broken)] == [r["loss"] for r in records(whole)]
    ours, theirs = (blake3_file(run / "model" / "model.safetensors") for run in (whole, broken))
    assert ours == theirs
    assert max(max(r["probe_gap"], r["logprob_gap"]) for r in records(whole)) < 1e-3
