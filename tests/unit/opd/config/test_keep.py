"""`keep`: a domain of general prompts, whose teacher is the start student."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from opd.config import PipelineConfig, split_rounds
from pipelines.merging.manifest import with_absolute_paths

DATA: dict[str, Any] = {
    "name": "n",
    "student": {"model": "base"},
    "experts": {"e": {"model": "m", "domain": "d"}},
    "domains": {"d": {"prompts": "d.jsonl"}},
    "keep": {"prompts": "general.jsonl", "weight": 0.5},
    "trainer": {"steps": 1, "samples_per_step": 4},
}


SERVED = {
    "engine": "openai",
    "payload": "sampled_logprobs",
    "servers": {"e": {"base_url": "http://127.0.0.1:1/v1", "model": "e"}},
}


def make(**changes: Any) -> PipelineConfig:
    return PipelineConfig.model_validate({**DATA, **changes})


def test_keep_is_a_domain_and_an_expert() -> None:
    config = make()
    assert list(config.domains) == ["d", "kept"] and config.domain_weights == {"d": 1.0, "kept": 0.5}
    assert {name: expert.model for name, expert in config.inline_experts.items() if name == "kept"} == {
        "kept": "student"
    }
    assert "kept" not in config.experts  # type: ignore[operator]
    assert not config.domains["kept"].is_rewarded
    assert PipelineConfig.model_validate(config.model_dump(mode="json")) == config
    assert list(make(keep=None).domains) == ["d"]


def test_keep_beside_experts_of_the_registry_and_in_every_round() -> None:
    config = make(
        experts={"use": ["e"]},
        rounds=[{}, {"experts": {"use": ["f"]}, "domains": {"f": {"prompts": "f.jsonl"}}}],
    )
    assert list(config.inline_experts) == ["kept"]
    assert [list(part.domains) for part in split_rounds(config)] == [["d", "kept"], ["f", "kept"]]


@pytest.mark.parametrize(
    "changes",
    [
        {"domains": {"d": {"prompts": "d.jsonl"}, "kept": {"prompts": "other.jsonl"}}},
        {"experts": {"kept": {"model": "m", "domain": "d"}}},
        {"teachers": SERVED},
        {"keep": {"weight": 1.0}},
        {"keep": {"prompts": "general.jsonl", "weight": 0}},
        {"trainer": {"steps": 1, "samples_per_step": 1}},
    ],
)
def test_what_keep_does_not_go_with_is_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        make(**changes)


def test_with_lora_what_is_kept_is_scored_by_the_ranks_whatever_the_experts_have() -> None:
    sampled: dict[str, Any] = {"teachers": SERVED, "objective": {"kind": "sampled"}}
    config = make(student={"model": "base", "lora": {}}, **sampled)
    assert [config.engine_of(name).engine for name in ("e", "kept")] == ["openai", "trainer"]
    assert config.engine_of("kept").payload == "sampled_logprobs"
    assert make().engine_of("kept").engine == "transformers" and len(make().engines) == 1
    with pytest.raises(ValidationError):  # a baseline is needed before the ranks compute
        make(
            student={"model": "base", "lora": {}},
            teachers=SERVED,
            objective={"kind": "sampled", "baseline": "leave_one_out"},
        )


def test_a_recorded_pipeline_is_one_again_whatever_keep_names() -> None:
    for prompts in ("general.jsonl", {"path": "owner/general", "chat": True}):
        config = make(keep={"prompts": prompts})
        recorded = with_absolute_paths(config)
        assert recorded["keep"]["prompts"] == recorded["domains"]["kept"]["prompts"]
        assert PipelineConfig.model_validate(recorded).keep is not None


@pytest.mark.parametrize("experts", [DATA["experts"], {"use": ["e"]}, {"use": "all"}])
def test_the_student_teaches_domains_whose_ability_it_keeps(experts: Any) -> None:
    domains = {"d": {}, "game": {"teachers": "student"}, "other": {"teachers": {"e": 0.5, "student": 0.5}}}
    config = make(domains=domains, experts=experts, keep=None)
    expert = config.inline_experts["student"]
    assert (expert.model, expert.domain) == ("student", "game")
    assert len(config.engines) == 1 and config.engine_of("student").engine == "transformers"
    assert PipelineConfig.model_validate(config.model_dump(mode="json")) == config


def test_an_expert_may_be_called_student() -> None:
    domains = {"d": {"teachers": "student"}}
    config = make(experts={"student": {"model": "m", "domain": "d"}}, domains=domains, keep=None)
    assert str(config.inline_experts["student"].model) == "m"
    assert make(experts={"use": ["student"]}, domains=domains, keep=None).inline_experts == {}


def test_the_student_has_no_server() -> None:
    domains = {"d": {"prompts": "d.jsonl"}, "game": {"prompts": "g.jsonl", "teachers": "student"}}
    changes: dict[str, Any] = {"domains": domains, "keep": None, "teachers": SERVED, "objective": {"kind": "sampled"}}
    with pytest.raises(ValidationError) as caught:
        make(**changes)
    (error,) = caught.value.errors()
    assert error["ctx"]["where"] == "domains.game.teachers" and "loads the student here" in error["msg"]
    config = make(**changes, student={"model": "base", "lora": {}})
    assert [config.engine_of(name).engine for name in ("e", "student")] == ["openai", "trainer"]
