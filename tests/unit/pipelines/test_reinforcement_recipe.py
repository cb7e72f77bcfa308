"""The recipe of an expert by reinforcement: what each method means, what a spec may change, and what is refused."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import yaml

from experts.rl.spec import ReinforceSpec, load_training
from experts.spec import ExpertsSpec
from opd.config.guard import merge_guard
from opd.config.reward import CriticBaseline, GroupBaseline, LeaveOneOutBaseline
from opd.errors import ConfigError
from opd.settings.yaml_files import validate_section
from pipelines.reinforce import build_pipeline, record_expert
from pipelines.specs import critic_options

VALID: dict[str, Any] = {
    "output_dir": "models",
    "runs": "runs",
    "base": {"model": "base"},
    "method": "ppo",
    "trainer": {"steps": 9, "lr": 1e-4},
    "experts": {
        "guess": {
            "domain": "number",
            "prompts": "n.jsonl",
            "environment": {"name": "number"},
            "eval": {"holdout": 0.1},
        },
        "answer": {"domain": "sums", "prompts": "s.jsonl", "eval": {"prompts": "e.jsonl", "verifier": "numeric"}},
    },
}


def changed(**changes: Any) -> dict[str, Any]:
    return copy.deepcopy(VALID) | changes


def spec_of(**changes: Any) -> ReinforceSpec:
    return validate_section(ReinforceSpec, changed(**changes), "s.yaml")


@pytest.mark.parametrize(
    ("method", "n", "baseline"),
    [
        ("ppo", 1, CriticBaseline(kind="critic")),
        ("grpo", 8, GroupBaseline(kind="group", divide_by_std=True)),
        ("rloo", 8, LeaveOneOutBaseline(kind="leave_one_out")),
    ],
)
def test_a_method_is_a_baseline_and_a_number_of_responses(method: str, n: int, baseline: Any) -> None:
    config = build_pipeline(spec_of(method=method), "guess")
    assert config.name == f"guess-{method}"
    assert (config.rollout.n, config.trainer.samples_per_step) == (n, 128)
    assert config.objective.reward is not None and config.objective.reward.baseline == baseline
    assert (config.objective.kind, config.teachers.engine, config.experts) == ("none", "none", {})
    assert config.domains["number"].environment is not None and config.student.model == Path("base")


def test_the_critic_begins_with_what_is_known_to_work() -> None:
    critic = CriticBaseline(kind="critic")
    assert (critic.gamma, critic.critic_lambda, critic.policy_lambda) == (1.0, 1.0, None)
    assert (critic.updates, critic.value_clip) == (2, None) and 1.5 <= critic.lr_ratio <= 5
    assert critic.warm_up.explained == 0.0 and critic.warm_up.at_most is None


def test_an_experts_own_keys_are_over_those_of_the_spec_and_these_over_the_recipes() -> None:
    data = changed(
        rollout={"max_new_tokens": 7},
        reward={"ratio": {"high": 3.0}, "baseline": {"updates": 3}},
        trainer={"steps": 9, "lr": 1e-4, "samples_per_step": 32},
    )
    data["experts"]["guess"] |= {"trainer": {"steps": 4}, "reward": {"baseline": {"lr_ratio": 5}}}
    spec = validate_section(ReinforceSpec, data, "s.yaml")
    guess, answer = (build_pipeline(spec, name) for name in ("guess", "answer"))
    assert (guess.trainer.steps, answer.trainer.steps) == (4, 9)
    assert guess.trainer.lr == 1e-4 and guess.rollout.max_new_tokens == 7 and guess.trainer.samples_per_step == 32
    rewards = [config.objective.reward for config in (guess, answer)]
    assert [r.ratio.high for r in rewards if r] == [3.0, 3.0]
    assert [(r.baseline.updates, r.baseline.lr_ratio) for r in rewards if r and r.baseline.kind == "critic"] == [
        (3, 5),
        (3, 2),
    ]


def test_an_expert_may_leave_its_base_without_a_warning() -> None:
    """With `kl_to_base` the base is the teacher from which the monitors of a merge would not see the student leave."""
    limits = build_pipeline(spec_of(kl_to_base=0.1, monitors={"entropy": {"stop": 3.0}}), "guess").monitors
    assert (limits.entropy.warn, limits.entropy.stop, limits.disagreement.warn) == (None, 3.0, None)
    assert limits.grad_norm.warn == 100 and limits.repetition.stop is not None


def test_the_base_is_read_as_the_spec_says() -> None:
    student = build_pipeline(
        spec_of(base={"model": "base", "template_date": "2020-01-02", "tool_call_parser": "hermes"}), "guess"
    ).student
    assert (str(student.template_date), student.tool_call_parser) == ("2020-01-02", "hermes")


def test_another_baseline_replaces_the_methods() -> None:
    reward = build_pipeline(spec_of(reward={"baseline": "ema"}), "guess").objective.reward
    assert reward is not None and reward.baseline.kind == "ema"
    whole = build_pipeline(spec_of(reward={"baseline": {"kind": "leave_one_out"}}), "guess").objective.reward
    assert whole is not None and whole.baseline.kind == "leave_one_out"


def test_the_base_may_be_the_one_teacher() -> None:
    config = build_pipeline(spec_of(kl_to_base=0.05), "guess")
    assert config.objective.kind == "reverse_kl" and config.teachers.engine == "transformers"
    assert isinstance(config.experts, dict) and config.experts["base"].model == Path("base")
    assert config.objective.reward is not None and config.objective.reward.weight == pytest.approx(20)
    assert config.trainer.max_grad_norm == pytest.approx(20), (
        "gradients are 20 times as large, and so is where they are cut"
    )
    critic = config.objective.reward.baseline
    assert isinstance(critic, CriticBaseline), "its gradients know no kl"
    assert critic_options(config, critic, 7).max_grad_norm == 1.0
    named = build_pipeline(spec_of(kl_to_base=0.05, reward={"baseline": "critic"}), "guess")
    assert named.objective == config.objective, "the same baseline, given by its name alone"
    data = changed(kl_to_base=0.05)
    data["experts"]["guess"]["kl_to_base"] = 0
    assert build_pipeline(validate_section(ReinforceSpec, data, "s.yaml"), "guess").objective.kind == "none"


def test_beside_the_base_every_weight_and_limit_grows_alike() -> None:
    """Also a weight that changes from step to step, and numbers that YAML takes for text."""
    reward = {"weight": "1e0", "schedule": {"to": 0.5, "steps": 5}}
    trainer = {"steps": 9, "lr": 1e-4, "max_grad_norm": "1e-1"}
    config = build_pipeline(spec_of(kl_to_base=0.05, reward=reward, trainer=trainer), "guess")
    assert config.objective.reward is not None and config.trainer.max_grad_norm == pytest.approx(2)
    assert [config.objective.reward.weight_at(step) for step in (1, 3, 5, 9)] == pytest.approx([20, 15, 10, 10])


def test_what_decides_the_weights_is_recorded_and_nothing_else() -> None:
    def record(**changes: Any) -> dict[str, Any]:
        spec = spec_of(**changes)
        return record_expert(build_pipeline(spec, "answer"), spec, {"weights": "w"}, "hash")

    same = [{"checkpoint": {"every": 3}}, {"runs": "elsewhere"}, {"monitors": {"length": {"warn": None}}}]
    assert all(record(**change) == record() for change in same)
    mapping = changed()
    for kind in ({}, {"columns": {"answer": "solution"}}, {"limit": 5}):
        mapping["experts"]["answer"] |= {"prompts": {"path": "s.jsonl", **kind}}
        spec = validate_section(ReinforceSpec, mapping, "s.yaml")
        assert (record_expert(build_pipeline(spec, "answer"), spec, {"weights": "w"}, "hash") == record()) == (not kind)
    other = [{"seed": 1}, {"method": "rloo"}, {"kl_to_base": 0.1}, {"trainer": {"steps": 10, "lr": 1e-4}}]
    assert all(record(**change) != record() for change in other)
    moved = changed()
    moved["experts"]["answer"] |= {"prompts": "moved.jsonl"}
    spec = validate_section(ReinforceSpec, moved, "s.yaml")
    assert record_expert(build_pipeline(spec, "answer"), spec, {"weights": "w"}, "hash") == record()


def refusal(data: dict[str, Any]) -> str:
    with pytest.raises(ConfigError) as error:
        spec = validate_section(ReinforceSpec, data, "s.yaml")
        for name in spec.experts:
            build_pipeline(spec, name)
    return str(error.value)


@pytest.mark.parametrize(
    ("change", "where", "found"),
    [
        ({"trainer": {"lr": 1e-4}}, "s.yaml: experts.guess.trainer.steps", "nothing"),
        ({"trainer": {"steps": 9, "learning_rate": 1.0}}, "experts.guess: trainer.learning_rate", "an unknown key"),
        ({"reward": {"baseline": "critics"}}, "experts.guess: objective.reward.baseline", "critics"),
        ({"method": "grpo", "rollout": {"n": 1}}, "experts.guess: objective.reward.baseline", "group with rollout.n 1"),
        ({"kl_to_base": -1}, "s.yaml: kl_to_base", "-1"),
        ({"kl_to_base": 0.1, "reward": {"weight": "much"}}, "experts.guess: objective.reward.weight", "'much'"),
        ({"kl_to_base": 0.1, "reward": {"schedule": {"to": []}}}, "experts.guess: objective.reward.schedule", "[]"),
        ({"kl_to_base": 0.1, "reward": {"weight": -0.5}}, "experts.guess: objective.reward.weight", "-0.5"),
        ({"base": {"from_scratch": None}}, "s.yaml: base", "neither"),
        ({"teachers": {}}, "s.yaml: teachers", "an unknown key"),
    ],
)
def test_a_wrong_key_is_refused_where_it_stands(change: dict[str, Any], where: str, found: str) -> None:
    message = refusal(changed(**change))
    assert message.startswith(where) and f"found:  {found}" in message, message


def test_an_expert_needs_a_reward() -> None:
    data = changed()
    del data["experts"]["answer"]["eval"]
    assert refusal(data).startswith("s.yaml: experts.answer.eval")


def test_the_method_decides_which_spec_it_is(tmp_path: Path) -> None:
    file = tmp_path / "s.yaml"
    file.write_text(yaml.safe_dump(VALID))
    spec = load_training(file, ["method=rloo"])
    assert isinstance(spec, ReinforceSpec) and spec.method == "rloo"
    texts = {"output_dir": "m", "base": {"model": "b"}, "train": {"max_steps": 1, "learning_rate": 1.0}}
    file.write_text(yaml.safe_dump(texts | {"experts": {"a": {"domain": "a", "data": "a.jsonl"}}}))
    assert isinstance(load_training(file), ExpertsSpec)
    with pytest.raises(ConfigError, match="one of: full, lora, ppo, grpo, rloo"):
        load_training(file, ["method=dpo"])


def test_a_guard_holds_for_experts_with_an_environment_unless_they_switch_it_off() -> None:
    experts = copy.deepcopy(VALID["experts"])
    spec = spec_of(guard={"answers": True}, experts=experts)
    config = build_pipeline(spec, "guess")
    assert config.guard is not None and config.guard.answers and config.domains["number"].guard is None
    assert build_pipeline(spec, "answer").guard is None, "it has no episodes"
    experts["guess"]["guard"] = {"workdir": "/box", "on_hit": "negative"}
    config = build_pipeline(spec_of(guard={}, experts=experts), "guess")
    found = merge_guard(config.guard, config.domains["number"].guard)
    assert found is not None and (found.workdir, found.on_hit) == ("/box", "negative")
    assert "guard" in record_expert(config, spec, {}, "hash") and "guard" not in record_expert(
        build_pipeline(spec_of(), "guess"), spec, {}, "hash"
    )
    experts["guess"]["guard"] = False
    assert build_pipeline(spec_of(guard={}, experts=experts), "guess").guard is None
