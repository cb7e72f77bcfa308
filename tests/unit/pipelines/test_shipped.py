"""Pipelines that ship with the spec that trains their experts, and the prompts that `make` writes for both."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from experts.rl.spec import ReinforceSpec, load_training
from experts.spec import ExpertsSpec, find_spec
from experts.suites import DOMAINS, agents, rewards, tools
from opd.config import load_pipeline
from opd.config.domains import RegisteredExperts
from opd.config.verifiers import PythonConfig
from pipelines.catalog import find_pipeline
from pipelines.reinforce import build_pipeline

MAKEFILE = Path(__file__).parents[3] / "Makefile"


SUITES = {"quickstart": "letters", "agents": "agents", "smollm2": "reasoning", "smollm2-tools": "tools"}
EPISODES = {"agents": agents.DOMAINS, "tools": tools.DOMAINS}


@pytest.mark.parametrize(("name", "suite"), SUITES.items())
def test_a_pipeline_merges_the_experts_that_its_spec_trains_on_the_prompts_that_its_suite_makes(name: str, suite: str):
    config, spec = load_pipeline(find_pipeline(name)), load_training(find_spec(f"{name}-experts"))
    assert isinstance(spec, ExpertsSpec)

    assert isinstance(config.experts, RegisteredExperts)
    assert list(config.experts.use) == list(config.domains) == list(spec.experts)
    assert {expert: e.domain for expert, e in spec.experts.items()} == {domain: domain for domain in config.domains}
    assert config.registry == spec.registry
    assert config.student.model == (spec.base.model or spec.output_dir / "base")
    for domain, merged in config.domains.items():
        assert domain in DOMAINS[suite]
        assert merged.prompts == spec.experts[domain].data == Path(f"prompts/{suite}/{domain}/train.jsonl")
        assert merged.eval is not None
        if suite in EPISODES:
            assert merged.environment is not None
            assert (merged.environment.name, merged.environment.max_turns) == (
                domain,
                EPISODES[suite][domain].max_turns,
            )
        assert merged.eval.prompts == Path(f"prompts/{suite}/{domain}/eval.jsonl")


def test_make_smollm2_writes_the_prompts_of_its_pipeline():
    named = re.findall(r"prompts make reasoning .*--domains (\S+)", MAKEFILE.read_text())
    pipelines = [load_pipeline(find_pipeline(name)) for name in ("smollm2", "smollm2-rewards")]
    assert [domains.split(",") for domains in named] == [list(pipeline.domains) for pipeline in pipelines]


@pytest.mark.parametrize("suite", EPISODES)
def test_make_holds_out_no_more_tasks_than_come_once(suite: str):
    asked = re.search(rf"prompts make {suite} .*--eval (\d+)", MAKEFILE.read_text())
    assert asked
    assert int(asked[1]) <= min(domain.held_out for domain in EPISODES[suite].values())


def test_the_suite_of_rewards_ships_a_spec_and_the_merge_of_its_experts():
    config, spec = load_pipeline(find_pipeline("rewards")), load_training(find_spec("rewards-experts"))

    assert isinstance(spec, ReinforceSpec) and isinstance(config.experts, RegisteredExperts)
    assert list(config.experts.use) == list(config.domains) == list(spec.experts) == list(DOMAINS["rewards"])
    assert (config.registry, config.student.model) == (spec.registry, spec.base_dir)
    for name, domain in config.domains.items():
        expert = spec.experts[name]
        assert (expert.domain, expert.prompts, expert.eval) == (name, domain.prompts, domain.eval)
        assert expert.environment == domain.environment
        assert domain.prompts == Path(f"prompts/rewards/{name}/train.jsonl") and domain.prompts in spec.base.data
        if name in rewards.GAMES:
            assert domain.environment is not None
            assert (domain.environment.name, domain.environment.max_turns) == (name, rewards.GAMES[name].max_turns)
        else:
            assert domain.eval is not None and domain.eval.verifier == PythonConfig(
                kind="python", function=rewards.VERIFIER
            )
        build_pipeline(spec, name)


def test_smollm2_learns_from_rewards_what_its_pipeline_merges():
    config, spec = load_pipeline(find_pipeline("smollm2-rewards")), load_training(find_spec("smollm2-rewards-experts"))

    assert isinstance(spec, ReinforceSpec) and isinstance(config.experts, RegisteredExperts)
    assert list(config.experts.use) == list(config.domains) == list(spec.experts)
    assert (config.registry, config.student.model) == (spec.registry, spec.output_dir / "base")
    assert spec.base.model == load_pipeline(find_pipeline("smollm2")).student.model
    for name, domain in config.domains.items():
        assert (spec.experts[name].domain, spec.experts[name].prompts) == (name, domain.prompts)
        assert spec.experts[name].eval == domain.eval and domain.prompts in spec.base.data
        build_pipeline(spec, name)


def test_all_domains_at_once_have_the_responses_of_all_experts():
    merged, alone = load_pipeline(find_pipeline("rewards")), load_pipeline(find_pipeline("rewards-at-once"))
    spec = load_training(find_spec("rewards-experts"))
    assert isinstance(spec, ReinforceSpec)

    assert alone.student == merged.student
    assert {n: d.model_copy(update={"teachers": None}) for n, d in alone.domains.items()} == merged.domains
    assert {domain.teachers for domain in alone.domains.values()} == {"base"}
    experts = [build_pipeline(spec, name) for name in spec.experts]
    for expert in experts:
        assert isinstance(expert.experts, dict) and isinstance(alone.experts, dict)
        assert expert.experts["base"].model == alone.experts["base"].model == spec.base_dir
        assert expert.objective == alone.objective
        assert (expert.trainer.lr, expert.trainer.max_grad_norm) == (alone.trainer.lr, alone.trainer.max_grad_norm)
    assert sum(e.trainer.steps * e.trainer.samples_per_step for e in experts) == (
        alone.trainer.steps * alone.trainer.samples_per_step
    )


def test_make_rl_holds_out_no_more_tasks_than_come_once():
    asked = re.search(r"prompts make rewards .*--eval (\d+)", MAKEFILE.read_text())
    assert asked
    assert int(asked[1]) <= min(game.held_out for game in rewards.GAMES.values())
