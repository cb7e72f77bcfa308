"""Teacher turns through the real engines: two engines in one process, killed and resumed bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from opd import cluster
from opd.config import PipelineConfig
from opd.config.sections import ClusterConfig
from opd.records.types import Prompt, Rollout
from opd.rollouts.episodes.drift import DriftOptions, TeacherTurns
from opd.rollouts.vllm import VLLMRolloutEngine
from opd.settings.yaml_files import validate_section
from pipelines.specs import TrainingFeatures, rollout_spec
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


def test_an_expert_writes_turns_beside_the_student(tmp_path: Path, make_model_dir: Callable[..., Path]) -> None:
    from transformers import AutoTokenizer

    names = ("student", "left", "right")
    models = {name: make_model_dir(tmp_path / name, seed=seed) for seed, name in enumerate(names)}
    tokenizer = AutoTokenizer.from_pretrained(models["student"])
    acts = {"environment": {"name": "tests.integration.corridor:Corridor", "max_turns": 5}}
    data = {
        "name": "test", "student": {"model": models["student"]}, "domains": {"left": acts, "right": acts},
        "experts": {name: {"model": models[name], "domain": name} for name in ("left", "right")},
        "rollout": {"max_new_tokens": 6, "max_model_len": 96, "temperature": 0.01}, "trainer": {"steps": 1, "samples_per_step": 8},
    }  # fmt: skip
    drift = {
        name: DriftOptions(teacher_turns=TeacherTurns(model_dir=models[name], share=0.6, over_steps=2, train=False))
        for name in ("left", "right")
    }
    text = [(domain, n, f"go {domain[0]}{n}") for domain in ("left", "right") for n in range(4)]
    prompts = [
        Prompt(id=f"{d}/{n}", domain=d, token_ids=tuple(tokenizer(t)["input_ids"]), text=t, metadata={"length": 3 + n})
        for d, n, t in text
    ]
    with cluster.ray_session(ClusterConfig(), 8):
        config, end = validate_section(PipelineConfig, data, "test"), (tokenizer.eos_token_id,)
        engine = VLLMRolloutEngine(
            rollout_spec(config, models["student"], len(tokenizer), end, TrainingFeatures(drift=drift)), tokenizer
        )
        engine.wait_ready()
        first, again, last = (engine.generate(prompts, step=step, policy_version=0) for step in (1, 1, 3))
    for one, other in zip(first.rollouts, again.rollouts, strict=True):
        assert (one.response_ids, one.spans) == (other.response_ids, other.spans), "each expert was loaded again"
    for domain in ("left", "right"):
        mine = [rollout for rollout in first.rollouts if rollout.domain == domain]
        assert first.episodes[domain].audit.teacher_turns > 0
        assert written_by(mine, "teacher", str(models[domain])) > 0.9
        assert written_by(mine, "policy", str(models["student"])) > 0.9
        assert written_by(mine, "teacher", str(models["student"])) < 0.7, "the two are apart"
        assert last.episodes[domain].audit.teacher_turns == 0
    assert {span.origin for rollout in last.rollouts for span in rollout.spans} == {"policy", "environment"}


@pytest.mark.slow
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
    resumed = opd("merge", "--resume", broken, cwd=tmp_path)
    assert resumed.returncode == 0, resumed.stderr
    assert [record["episodes"] for record in records(broken)] == [record["episodes"] for record in records(whole)]
    ours, theirs = (load_file(run / "model" / "model.safetensors") for run in (whole, broken))
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
