"""From the section `guard` of a pipeline to a guard."""

from __future__ import annotations

from opd.config.guard import EndpointJudge as EndpointConfig
from opd.config.guard import GuardConfig, JudgeConfig
from opd.guard.guard import Guard, GuardOptions
from opd.guard.judge import CachedJudge, EndpointJudge, LogProbJudge
from opd.guard.records import Judge
from opd.guard.rules import RuleSet, read_rules
from opd.named import users


def build_guard(config: GuardConfig) -> Guard:
    """The guard that a section describes. Raises: ConfigError for rules or a scorer that cannot be used."""
    rules = RuleSet([read_rules(name) for name in config.rules], config.protected)
    judge = None if config.judge is None else _judge(config.judge, config.deadline_s)
    options = GuardOptions(
        on_failure=config.on_failure,
        tools=config.tools,
        workdir=config.workdir,
        home=config.home,
        keeps_shell=config.keeps_shell,
    )
    return Guard(rules, None if judge is None else CachedJudge(judge, config.cache), options)


def _judge(config: JudgeConfig, deadline_s: float) -> Judge:
    if isinstance(config, EndpointConfig):
        return EndpointJudge(
            config.base_url,
            config.model,
            api_key_env=config.api_key_env,
            threshold=config.threshold,
            deadline_s=deadline_s,
        )
    return LogProbJudge(
        users(config.scorer, "guard.judge.scorer", "a function of prompt and verdicts"), config.threshold
    )
