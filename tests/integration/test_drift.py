"""Teacher turns through the real engines: two engines in one process, killed and resumed bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from opd.stream.rollouts import read_file
from opd.types import Rollout
from tests.integration.test_agents import agent_pipeline
from tests.integration.test_merge import kill_when_logged, opd, records, write

CURES = {
    "max_turns": 5,
    "curriculum": {"first": 3, "over_steps": 2},
    "teacher_turns": {"share": 0.6, "over_steps": 3, "train": True},
    "turn_weights": {"decay": 0.8, "divergence": 0.5},
}


def by(rollout: Rollout, origin: str) -> list[int]:
    """Places of the tokens of one origin."""
    origins = [span.origin for span in rollout.spans for _ in range(span.length)]
    return [place for place, found in enumerate(origins) if found == origin]


def written_by(rollouts: list[Rollout], origin: str, model_dir: str) -> float:
    """Share of the tokens of an origin that are the likeliest of a model."""
    import torch
    from transformers import AutoModelForCausalLM

    model, hits = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32), []
    for rollout in rollouts:
        ids = [*rollout.prompt_ids, *rollout.response_ids]
        with torch.no_grad():
            best_T = model(torch.tensor([ids])).logits[0].argmax(-1).tolist()
        start = len(rollout.prompt_ids)
        hits += [best_T[start + place - 1] == ids[start + place] for place in by(rollout, origin)]
    return sum(hits) / len(hits)


def test_cures_through_the_real_engines_killed_and_resumed(tmp_path: Path, pipeline: dict[str, Any]) -> None:
    import torch
    from safetensors.torch import load_file

    agent_pipeline(tmp_path, pipeline)
    pipeline["domains"]["right-domain"]["environment"] |= CURES
    pipeline["rollout"]["temperature"] = 0.01  # so that a token tells who wrote it
    file = write(tmp_path, pipeline)
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    done = opd("merge", file, "--run-dir", whole, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    found = [record["episodes"]["right-domain"] for record in records(whole)]
    assert found[0]["teacher_turns"] > found[1]["teacher_turns"] > 0 and "curriculum" in found[0]["stop_reasons"]
    assert all(record["logprob_gap"] < 1e-3 for record in records(whole)), (
        "the expert's tokens are not held against the student"
    )
    tokens = [record["domains"]["right-domain"]["tokens"] for record in records(whole)]
    assert all(trained > told["tokens"] for trained, told in zip(tokens[:2], found, strict=False)), (
        "taught tokens are trained"
    )

    kill_when_logged(file, broken, 2)
    first = read_file((broken / "targets" / "step-000001" / "rollouts.arrow").read_bytes(), 1 << 20)
    acted = [rollout for rollout in first if rollout.domain == "right-domain"]
    expert = pipeline["experts"]["right"]["model"]
    assert (
        written_by(acted, "taught", expert) > 0.98 and written_by(acted, "policy", pipeline["student"]["model"]) > 0.98
    )
    assert written_by(acted, "taught", pipeline["student"]["model"]) < 0.7

    resumed = opd("merge", "--resume", broken, cwd=tmp_path)
    assert resumed.returncode == 0, resumed.stderr
    assert [record["episodes"] for record in records(broken)] == [record["episodes"] for record in records(whole)]
    ours, theirs = (load_file(run / "model" / "model.safetensors") for run in (whole, broken))
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
