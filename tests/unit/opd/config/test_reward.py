"""`objective.reward` is refused where nothing gives a reward, and otherwise read as written."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from opd.config import PipelineConfig
from opd.errors import ConfigError
from opd.settings.yaml_files import apply_overrides, validate_section

PIPELINE: dict[str, Any] = {
    "name": "two",
    "student": {"model": "base"},
    "experts": {"math": {"model": "m", "domain": "math"}, "code": {"model": "c", "domain": "code"}},
    "domains": {"math": {"prompts": "math.jsonl", "eval": {"prompts": "e.jsonl"}}, "code": {"prompts": "code.jsonl"}},
    "trainer": {"steps": 3, "samples_per_step": 4},
}


def read(*overrides: str) -> PipelineConfig:
    return validate_section(PipelineConfig, apply_overrides(copy.deepcopy(PIPELINE), list(overrides)), "p.yaml")


def test_a_domain_with_a_verifier_or_an_environment_takes_part() -> None:
    config = read("objective.reward={}", "domains.code.environment={name: maze}")
    assert [domain.is_rewarded for domain in config.domains.values()] == [True, True]
    pure = read("objective.reward={}", "domains.math.reward=true")
    assert [domain.is_rewarded for domain in pure.domains.values()] == [True, False], "the other stays pure divergence"
    off = read("objective.reward={}", "domains.code.agent={command: [python3]}", "domains.math.reward=false")
    assert [domain.is_rewarded for domain in off.domains.values()] == [False, True]
    assert read().objective.reward is None


def test_a_replay_earns_nothing_and_takes_no_part() -> None:
    """No environment runs beside it, and the verifier of its exams judges whole episodes."""
    replay = "domains.code.environment={name: maze, replay: true}"
    assert [domain.is_rewarded for domain in read("objective.reward={}", replay).domains.values()] == [True, False]
    with pytest.raises(ConfigError, match=r"domains\.code\.reward"):
        read("objective.reward={}", replay, "domains.code.reward=true")
    with pytest.raises(ConfigError, match="no domain that gives a reward"):
        read("objective.reward={}", replay, "domains.math.reward=false")


def test_a_baseline_may_be_a_name() -> None:
    reward = read("objective.reward={baseline: ema, weight: 0.5}").objective.reward
    assert reward is not None and reward.baseline.kind == "ema" and reward.baseline.decay == 0.95
    assert reward == read("objective.reward={baseline: {kind: ema, decay: 0.95}, weight: 0.5}").objective.reward
    assert PipelineConfig.model_validate(read("objective.reward={}").model_dump(mode="json")) == read(
        "objective.reward={}"
    )


@pytest.mark.parametrize("kind", ["forward_kl", "sampled", "top_k"])
def test_every_divergence_may_have_a_reward_beside_it(kind: str) -> None:
    payload = {"top_k": "top_k", "sampled": "sampled_logprobs"}.get(kind, "hidden_states")
    config = read(f"objective={{kind: {kind}, reward: {{weight: 2}}}}", f"teachers.payload={payload}")
    assert config.objective.reward is not None and config.objective.reward.weight == 2


@pytest.mark.parametrize(
    ("overrides", "told"),
    [
        (
            ["objective.reward={}", "domains.code.reward=true"],
            ["domains.code.reward", "nothing gives a reward", "an eval whose verifier"],
        ),
        (["domains.math.reward=true"], ["domains.math.reward", "true without objective.reward"]),
        (
            ["objective.reward={}", "domains.math.reward=false"],
            ["objective.reward", "no domain that gives a reward", "at least one domain"],
        ),
        (
            ["objective.reward={baseline: group}"],
            ["objective.reward.baseline", "every advantage would be 0", "leave_one_out or ema"],
        ),
        (["objective.reward={baseline: emma}"], ["objective.reward.baseline", "did you mean `ema`?"]),
        (["objective.reward={weight: 0}"], ["objective.reward.weight", "0 in every step", "above 0"]),
        (["objective.reward={weight: 0, schedule: {to: 0, steps: 3}}"], ["objective.reward.weight", "above 0"]),
        (["objective.reward={schedule: {to: 1, steps: 1}}"], ["objective.reward.schedule.steps"]),
        (["objective.reward={ratio: {low: 1.5}}"], ["objective.reward.ratio.low"]),
        (["objective.reward={ratio: {hi: 2}}"], ["did you mean `high`?"]),
        (["objective.reward={baseline: {kind: none, decay: 0.5}}"], ["objective.reward.baseline", "decay"]),
    ],
)
def test_what_cannot_be_trained_on_is_refused(overrides: list[str], told: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        read(*overrides)
    assert all(word in str(caught.value) for word in told), str(caught.value)


def test_a_run_without_divergence_needs_a_reward() -> None:
    alone = ["experts={}", "domains.code.eval={holdout: 0.5}", "teachers={engine: none}"]
    assert read(*alone, "objective={kind: none, reward: {}}").objective.HAS_DIVERGENCE is False
    with pytest.raises(ConfigError, match="none without"):
        read(*alone, "objective={kind: none}")


def test_a_group_may_be_tried_more_than_once() -> None:
    assert read("objective.reward={baseline: group}", "rollout.n=2").rollout.n == 2
