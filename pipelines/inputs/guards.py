"""Check a pipeline's guard before any compute: its rules, its judge, and whether there are calls for it to check."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from opd.config import PipelineConfig
from opd.config.domains import DomainConfig
from opd.config.guard import EndpointJudge, LocalJudge, merge_guard
from opd.errors import ConfigError
from opd.settings.suggestions import did_you_mean

if TYPE_CHECKING:  # the guard takes a tenth of a second to import, and most pipelines have none
    from opd.guard.build import GuardSpec


def guard_of_domain(config: PipelineConfig, domain: DomainConfig, judged: Path | None) -> GuardSpec | None:
    """Return the guard that checks the calls of a domain; `judged` is the run's file of the judge's answers.

    Raises: ConfigError for rules that cannot be read.
    """
    section = merge_guard(config.guard, domain.guard)
    if section is None:
        return None
    from opd.guard.build import guard_spec

    return guard_spec(section, judged)


def check_guards(guards: Mapping[str, GuardSpec], tools: Mapping[str, Sequence[str]]) -> None:
    """Compile the rules of each domain's guard, and check that its judge can be used. Raises: ConfigError.

    `tools`: domain with an environment -> names of its tools. The tools of a domain whose agent is a program are not known.
    """
    if not guards:
        return
    from opd.guard.examples import refuse_wrong_rules
    from opd.guard.rules import RuleSet

    for domain, spec in guards.items():
        _refuse_missing_key(domain, spec)
        refuse_wrong_rules(spec)
        RuleSet(spec.rules, spec.config.protected)
        _refuse_missing_model(spec)
    if all(domain in tools for domain in guards):
        _refuse_unknown_tools(guards, tools)
        _refuse_nothing_to_check(guards, tools)


def _refuse_missing_key(domain: str, spec: GuardSpec) -> None:
    judge = spec.config.judge
    if isinstance(judge, EndpointJudge) and judge.api_key_env is not None and not os.environ.get(judge.api_key_env):
        raise ConfigError.at(
            "guard.judge.api_key_env",
            found=f"the environment variable {judge.api_key_env} is empty",
            wanted=f"the key of {judge.base_url}, which judges domain {domain}",
            fix=f"export {judge.api_key_env}, or leave the key out",
        )


def _refuse_missing_model(spec: GuardSpec) -> None:
    judge = spec.config.judge
    if not isinstance(judge, LocalJudge):
        return
    if judge.scorer is not None:
        from opd.guard.build import users_scorer

        users_scorer(judge.scorer)
    elif judge.model is not None and not (judge.model / "config.json").is_file():
        raise ConfigError.at(
            "guard.judge.model",
            found=f"no config.json in {judge.model}",
            wanted="the Hugging Face directory of a model: config, tokenizer, safetensors",
            fix="correct the path",
        )


def _refuse_unknown_tools(guards: Mapping[str, GuardSpec], tools: Mapping[str, Sequence[str]]) -> None:
    """Refuse names of tools that no tool has, because a misspelt name would leave a tool without a guard. Raises: ConfigError."""
    guarded_tools = {tool for domain in guards for tool in tools[domain]}
    for spec in guards.values():
        for key, names in (("only_tools", spec.config.only_tools or ()), ("tools", spec.config.tools)):
            strange = next((name for name in names if name not in guarded_tools), None)
            if strange is not None:
                raise ConfigError.at(
                    f"guard.{key}",
                    found=f"`{strange}`",
                    wanted=f"tools of the guarded environments: {', '.join(sorted(guarded_tools)) or 'there are none'}",
                    fix=did_you_mean(strange, guarded_tools, "correct the name"),
                )


def _refuse_nothing_to_check(guards: Mapping[str, GuardSpec], tools: Mapping[str, Sequence[str]]) -> None:
    if not any(tools[domain] or spec.config.answers for domain, spec in guards.items()):
        raise ConfigError.at(
            "guard",
            found=f"environments without tools: {', '.join(guards)}",
            wanted="a tool whose calls can be checked, or guard.answers: true",
            fix="leave `guard` out, or let it read answers",
        )
