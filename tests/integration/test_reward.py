"""A task reward beside the exact divergence, through the real engines: it rises, both streams have curves, and a kill changes no
bit."""

from __future__ import annotations

import json
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
import yaml

from opd.files import blake3_file
from tests.integration.test_merge import kill_when_logged, records
from tests.integration.test_schedules import opd

JUDGE = '''
def letters(text, answer, metadata):
    """Share of small letters."""
    return sum(c.islower() for c in text) / max(1, len(text))
'''


def rewarded(root: Path, pipeline: dict[str, Any], **reward: Any) -> Path:
    """The pipeline with rewards in one of its domains; the other one stays pure divergence."""
    (root / "judge.py").write_text(JUDGE)
    domains = pipeline["domains"]
    domains["left-domain"]["eval"]["verifier"] = {"kind": "python", "function": "judge:letters"}
    domains["right-domain"]["reward"] = False
    pipeline["objective"] = {"reward": reward}
    file = root / "pipeline.yaml"
    file.write_text(yaml.safe_dump(pipeline))
    return file


def test_a_reward_rises_beside_the_divergence(tmp_path: Path, pipeline: dict[str, Any]) -> None:
    pipeline["rollout"] |= {"n": 4}
    pipeline["trainer"] |= {"steps": 20, "samples_per_step": 32, "lr": 5.0e-3, "ranks": 1}
    pipeline["checkpoint"] = {"every": 100}
    file = rewarded(tmp_path, pipeline, weight=10.0, baseline="leave_one_out", compare_every=10)
    opd("merge", file, "--run-dir", "run", cwd=tmp_path)
    steps = records(tmp_path / "run")
    rewards = [step["reward"]["domains"]["left-domain"]["reward"] for step in steps]
    assert fmean(rewards[-3:]) > rewards[0] + 0.3, rewards
    losses = [step["domains"]["right-domain"]["loss"] for step in steps]
    assert fmean(losses[-3:]) < losses[0], "the other domain learns from its expert"
    for step in steps:
        (domain,) = step["reward"]["domains"].values()
        assert domain["episodes"] == 16 and domain["tokens"] == step["domains"]["left-domain"]["tokens"]
        assert domain["masked"] == 0 and "failed" not in domain, "the engine's policy is the trainer's"
    compared = {step["step"]: step["reward"] for step in steps if "cosine" in step["reward"]}
    assert sorted(compared) == [10, 20]
    for step in (10, 20):
        both = compared[step]
        whole = both["divergence_norm"] ** 2 + both["policy_norm"] ** 2
        whole += 2 * both["cosine"] * both["divergence_norm"] * both["policy_norm"]
        assert steps[step - 1]["grad_norm"] == pytest.approx(whole**0.5, rel=1e-3), "DeepSpeed's own norm of the sum"
        assert max(steps[step - 1]["logprob_gap"], steps[step - 1]["probe_gap"]) < 1e-3
    layouts = json.loads((tmp_path / "run" / "layouts.json").read_text())
    assert {layouts["student"]["layout"], *(t["layout"] for t in layouts["teachers"].values())} == {"shared"}
    page = (tmp_path / "run" / "report.html").read_text()
    assert "Reward of the student" in page and "Cosine of the gradients" in page


@pytest.mark.slow
def test_a_killed_merge_with_rewards_ends_with_the_same_weights(tmp_path: Path, pipeline: dict[str, Any]) -> None:
    pipeline["trainer"] |= {"ranks": 2}
    pipeline["schedule"] = {"mode": "one_step_off"}
    file = rewarded(tmp_path, pipeline, baseline={"kind": "ema", "decay": 0.5}, compare_every=3)
    opd("merge", file, "--run-dir", "whole", cwd=tmp_path)
    kill_when_logged(file, tmp_path / "broken", 4)
    assert "left-domain" in (tmp_path / "broken" / "checkpoints" / "step-000002" / "credit" / "credit.json").read_text()
    opd("merge", "--resume", "broken", cwd=tmp_path)
    whole, broken = (records(tmp_path / name) for name in ("whole", "broken"))
    assert [r["reward"] for r in broken] == [r["reward"] for r in whole]
    ours, theirs = (blake3_file(tmp_path / name / "model" / "model.safetensors") for name in ("whole", "broken"))
    assert ours == theirs
