"""The domains and experts that `efforts` makes, and what a pipeline may not say about them."""

from __future__ import annotations

from typing import Any

import pytest

from opd.config import PipelineConfig, split_rounds
from opd.errors import ConfigError
from opd.settings.yaml_files import validate_section

EFFORTS: dict[str, Any] = {"low": {}, "high": {"text": "think: "}, "max": {"chat_template_kwargs": {"depth": 3}}}


def data(**more: Any) -> dict[str, Any]:
    return {
        "name": "n",
        "student": {"model": "base", "chat_template_kwargs": {"enable_thinking": True}},
        "experts": {
            "quick": {"model": "a", "domain": "math", "effort": "low"},
            "slow": {"model": "b", "domain": "math", "effort": "max"},
            "coder": {"model": "c", "domain": "code"},
        },
        "domains": {"math": {"prompts": "math.jsonl", "weight": 2}, "code": {"prompts": "code.jsonl"}},
        "efforts": EFFORTS,
        "trainer": {"steps": 1, "samples_per_step": 12},
    } | more


def load(**more: Any) -> PipelineConfig:
    return validate_section(PipelineConfig, data(**more), "p.yaml")


def test_a_domain_becomes_one_for_each_effort_in_order() -> None:
    config = load(keep={"prompts": "general.jsonl"})
    assert list(config.domains) == [f"{d}-{e}" for d in ("math", "code") for e in ("low", "high", "max")] + ["kept"]
    assert {d.weight for name, d in config.domains.items() if name.startswith("math-")} == {2.0}
    assert config.split_effort("math-high") == ("math", "high") and config.split_effort("kept") == ("kept", None)
    assert config.prompt_orders == {name: name.split("-")[0] for name in config.domains}
    assert {name: e.domain for name, e in config.inline_experts.items()} == {
        "quick": "math-low", "slow": "math-max", "coder": "code", "kept": "kept",
    }  # fmt: skip


def test_the_tag_is_a_variable_of_the_effort_unless_the_section_says_otherwise() -> None:
    config = load()
    of = config.chat_template_kwargs_of
    assert of("math-low") == {"enable_thinking": True, "reasoning_effort": "low"}
    assert (of("math-high"), config.effort_text_of("math-high")) == ({"enable_thinking": True}, "think: ")
    assert (of("math-max"), config.effort_text_of("math-max")) == ({"enable_thinking": True, "depth": 3}, "")
    assert of("math-max", effort=False) == {"enable_thinking": True}


def test_keys_of_one_effort_go_before_those_of_the_domain() -> None:
    domains = {"math": {"prompts": "math.jsonl", "weight": 2}, "math-low": {"weight": 5, "extrapolate": 0.5}}
    config = load(domains=domains, experts={"one": {"model": "a", "domain": "math"}})
    assert list(config.domains) == ["math-low", "math-high", "math-max"]
    assert [d.weight for d in config.domains.values()] == [5, 2, 2]
    assert str(config.domains["math-low"].prompts) == "math.jsonl"


def test_a_domain_beside_one_with_an_effort_of_its_own_is_not_lost() -> None:
    domains = {"math-max": {"prompts": "m.jsonl", "effort": "max"}, "math-max-low": {"prompts": "n.jsonl"}}
    config = load(domains=domains, experts={"one": {"model": "a", "domain": "math"}})
    assert list(config.domains) == ["math-max", "math-max-low-low", "math-max-low-high", "math-max-low-max"]


def test_a_recorded_pipeline_and_a_round_are_expanded_once() -> None:
    config = load(rounds=[{}, {"experts": {"new": {"model": "d", "domain": "math", "effort": "high"}}}])
    assert PipelineConfig.model_validate(config.model_dump()) == config
    assert PipelineConfig.model_validate(config.model_dump(mode="json")) == config
    last = split_rounds(config)[1]
    assert list(last.domains) == list(config.domains) and last.inline_experts["new"].domain == "math-high"


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (
            {"efforts": {"low": {}}, "experts": {"e": {"model": "m", "domain": "math"}}},
            ["efforts", "found:  low", "two or more"],
        ),
        (
            {"experts": {"e": {"model": "m", "domain": "math", "effort": "medium"}}},
            ["experts.e.effort", "found:  medium", "low, high, max"],
        ),
        ({"efforts": {}}, ["experts.quick.effort", "found:  low", "without the section `efforts`"]),
        (
            {"domains": {"math-x": {"prompts": "m.jsonl", "effort": "low"}}},
            ["domains.math-x.effort", "ends with -low"],
        ),
        (
            {"domains": {"math-mid": {"prompts": "m.jsonl", "effort": "mid"}}},
            ["domains.math-mid.effort", "found:  mid", "low, high, max"],
        ),
        (
            {"domains": {"math": {"prompts": "m.jsonl", "agent": {"command": ["x"]}}}},
            ["efforts.high.text", "math-high with an agent", "chat_template_kwargs"],
        ),
        (
            {
                "efforts": {},
                "experts": {"e": {"model": "m", "domain": "math", "prompt": {"effort": False}}},
                "domains": {"math": {"prompts": "m.jsonl"}},
            },
            ["experts.e.prompt.effort", "found:  false"],
        ),
        (
            {"efforts": {"low": {"chat_template_kwargs": {"messages": 1}}, "max": {}}},
            ["efforts.low.chat_template_kwargs", "messages"],
        ),
    ],
)
def test_efforts_that_do_not_fit_are_refused(more: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(ConfigError) as error:
        load(**more)
    assert all(word in str(error.value) for word in words), str(error.value)
