"""The sub-agents of a pipeline's domains: make their options, and check that they fit the environments and prompts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from opd.config import PipelineConfig
from opd.config.domains import EnvironmentConfig
from opd.config.sub_agents import SubAgentConfig
from opd.environments import find_import_name
from opd.errors import ConfigError
from opd.rollouts.episodes.chat import ChatAppender
from opd.rollouts.episodes.sub_agents import SubAgentOptions, SubAgentsOptions


def sub_agents_options(config: PipelineConfig, domain: str, environment: EnvironmentConfig) -> SubAgentsOptions | None:
    """Return the sub-agents that the episodes of a domain may start; None if there are none.

    Raises: ConfigError if an environment's name is unknown.
    """
    if not environment.sub_agents:
        return None
    kinds = {name: _sub_agent(config, domain, agent) for name, agent in environment.sub_agents.items()}
    return SubAgentsOptions(kinds=kinds, at_most=environment.max_sub_agents, depth=environment.max_depth)


def _sub_agent(config: PipelineConfig, domain: str, agent: SubAgentConfig) -> SubAgentOptions:
    acting_domain = agent.domain or domain
    acts = config.domains[acting_domain].environment if agent.environment == "domain" else None
    acting: dict[str, Any] = {}
    if acts is not None:
        environment = find_import_name(acts.name, f"domains.{acting_domain}.environment.name")
        acting = {"environment": environment, "options": acts.options, "step_timeout_s": acts.step_timeout_s}
    return SubAgentOptions(
        description=agent.description,
        domain=agent.domain or "",
        system=agent.system,
        prompt=agent.prompt,
        result=agent.result,
        shares=agent.environment == "parent",
        max_turns=agent.max_turns,
        max_tokens=agent.max_tokens,
        **acting,
    )


def check_sub_agents(
    domain: str, environment: EnvironmentConfig, tools: Mapping[str, Sequence[str]], chat: ChatAppender | None
) -> None:
    """Check the sub-agents of a domain. `tools`: domain -> names of its environment's tools. `chat`: the chat template; None if
    prompts are plain text.

    Raises: ConfigError for two tools of one name, a sub-agent that could never act, or a system message that nobody reads.
    """
    for name, agent in environment.sub_agents.items():
        key = f"domains.{domain}.environment.sub_agents.{name}"
        acted_on = agent.domain or domain if agent.environment == "domain" else domain
        if any(name in tools[owner] for owner in (domain, acted_on)):
            raise ConfigError.at(
                key,
                found="a tool of the environment with the same name",
                wanted=f"a name that is none of {', '.join(dict.fromkeys([*tools[domain], *tools[acted_on]]))}",
                fix="rename the sub-agent",
            )
        if agent.environment == "parent" and not tools[domain]:
            raise ConfigError.at(
                f"{key}.environment",
                found=f"parent, but {environment.name} has no tools",
                wanted="an environment with tools: a turn without a call ends the sub-agent, so it could never act",
                fix="set it to none, or to domain, for an environment of its own",
            )
        if agent.system:
            _check_system(key, agent, chat)


def _check_system(key: str, agent: SubAgentConfig, chat: ChatAppender | None) -> None:
    """Refuse a system message that the student cannot read. Raises: ConfigError."""
    from jinja2 import TemplateError

    problem = "text for a system message, but the domain's prompts are no chat messages"
    if chat is not None:
        try:
            chat.encode_opening(
                [{"role": "system", "content": agent.system}, {"role": "user", "content": agent.prompt}]
            )
            return
        except TemplateError as error:
            problem = f"text for a system message, which the student's chat template refuses: {error}"
    raise ConfigError.at(
        f"{key}.system",
        found=problem,
        wanted="a system message that the student can read",
        fix=f"say it in {key}.prompt, before {{task}}",
    )
