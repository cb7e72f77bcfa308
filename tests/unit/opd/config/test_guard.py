"""The section `guard` and the switch of a domain: what holds where, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest

from opd.config import PipelineConfig
from opd.config.guard import GuardConfig, merge_guard
from opd.errors import ConfigError
from opd.settings.yaml_files import validate_section

ACTING = {"prompts": "a.jsonl", "environment": {"name": "sandbox"}}
VALID: dict[str, Any] = {
    "name": "one",
    "student": {"model": "base"},
    "experts": {"code": {"model": "m", "domain": "code"}},
    "domains": {"code": ACTING},
    "trainer": {"steps": 3, "samples_per_step": 4},
}
PLAIN = {"prompts": "b.jsonl", "teachers": "code"}


def pipeline(guard: Any, domains: dict[str, Any] | None = None, **more: Any) -> PipelineConfig:
    section = {} if guard is None else {"guard": guard}
    return validate_section(
        PipelineConfig, VALID | section | more | ({"domains": domains} if domains else {}), "p.yaml"
    )


def test_a_domain_changes_some_keys_and_leaves_the_others() -> None:
    own = {"protected": ["/box/.eval/**"], "workdir": "/box", "on_hit": "mask"}
    config = pipeline({"deadline_s": 3}, {"code": ACTING | {"guard": own}, "plain": PLAIN})
    found = merge_guard(config.guard, config.domains["code"].guard)
    assert found == GuardConfig.model_validate({"deadline_s": 3, **own})
    again = validate_section(PipelineConfig, config.model_dump(mode="json"), "pipeline.yaml")
    assert again == config, "as a resume reads it"


def test_false_switches_it_off_in_a_domain() -> None:
    config = pipeline({}, {"code": ACTING, "free": ACTING | {"teachers": "code", "guard": False}})
    assert [merge_guard(config.guard, d.guard) is None for d in config.domains.values()] == [False, True]
    assert merge_guard(None, None) is None


def test_negative_is_for_domains_with_a_reward() -> None:
    rewarded = {"kind": "reverse_kl", "reward": {"weight": 1.0}}
    assert pipeline({"on_hit": "negative"}, objective=rewarded).guard is not None
    with pytest.raises(ConfigError, match="domain code trains on no reward"):
        pipeline(
            {"on_hit": "negative"},
            {"code": ACTING | {"reward": False}, "b": ACTING | {"teachers": "code"}},
            objective=rewarded,
        )


@pytest.mark.parametrize(
    ("guard", "domains", "told"),
    [
        ({}, {"code": {"prompts": "a.jsonl"}}, ["guard", "a guard for no domain", "`environment` or `agent`"]),
        ({}, {"code": ACTING | {"guard": False}}, ["guard", "a guard for no domain"]),
        (None, {"code": ACTING | {"guard": True}}, ["domains.code.guard", "no section `guard`", "`guard: {}`"]),
        (None, {"code": ACTING | {"guard": {"answers": True}}}, ["domains.code.guard", "no section `guard`"]),
        ({}, {"code": ACTING, "b": PLAIN | {"guard": {"answers": True}}}, ["domains.b.guard", "a guard without episodes"]),
        ({}, {"code": ACTING | {"guard": {"workdirs": "/"}}}, ["domains.code.guard.workdirs", "an unknown key", "did you mean `workdir`?"]),
        ({}, {"code": ACTING | {"guard": {"workdir": "box"}}}, ["domains.code.guard.workdir", "an absolute path"]),
        ({"on_hit": "negative"}, None, ["guard.on_hit", "negative", "objective.reward"]),
        ({}, {"code": ACTING | {"guard": {"on_hit": "negative"}}}, ["domains.code.guard.on_hit", "objective.reward"]),
        ({"judge": {"kind": "endpoint", "model": "j"}}, None, ["guard.judge.base_url", "nothing", "no default"]),
        ({"judge": {"kind": "endpoint", "model": "j", "base_url": "localhost"}}, None, ["guard.judge.base_url", "http://HOST:PORT/v1"]),
        ({"judge": {"kind": "local"}}, None, ["guard.judge", "neither", "either `model` or `scorer`"]),
        ({"judge": {"model": "j"}}, None, ["guard.judge", "`kind: endpoint` or `kind: local`"]),
        ({"rules": []}, None, ["guard.rules"]),
        ({"only_tools": []}, None, ["guard.only_tools"]),
        ({"protected": ["box/.eval"]}, None, ["guard.protected", "begins with `/` or `**/`"]),
        ({"protected": ["/box/{a,b"]}, None, ["guard.protected", "braces in pairs"]),
        ({"on_failure": "end"}, None, ["guard.on_failure"]),
        ({}, {"code": ACTING | {"guard": 3}}, ["domains.code.guard", "3"]),
    ],
)  # fmt: skip
def test_what_is_refused(guard: Any, domains: Any, told: list[str]) -> None:
    with pytest.raises(ConfigError) as error:
        pipeline(guard, domains)
    assert all(part in str(error.value) for part in told), error.value
