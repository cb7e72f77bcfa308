"""Scoring while the student still writes, through the real engines: single turns that are killed and resumed, and episodes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from opd.files import blake3_file
from tests.integration.test_agents import agent_pipeline
from tests.integration.test_merge import kill_when_logged, opd, records, write


def scored_early(record: dict[str, Any]) -> bool:
    """Whether teachers were at work before all was written."""
    return bool(record["busy_s"]["teachers"] > record["phase_s"]["score"])


@pytest.mark.slow  # three starts; the next test has one
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


def test_episodes_and_single_turns_in_one_merge(tmp_path: Path, pipeline: dict[str, Any]) -> None:
    agent_pipeline(tmp_path, pipeline)
    pipeline["schedule"] = {"score_early": 2}
    whole = tmp_path / "whole"
    done = opd("merge", write(tmp_path, pipeline), "--run-dir", whole, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    for record in records(whole):
        assert {d: s["samples"] for d, s in record["domains"].items()} == {"left-domain": 8, "right-domain": 8}
        assert record["episodes"]["right-domain"]["episodes"] == 8
        assert record["logprob_gap"] < 1e-3 and record["probe_gap"] < 1e-3
        assert scored_early(record)
