"""Try every environment of a pipeline before any compute: its class, its options, its tools, and the chat template."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

from opd.config import PipelineConfig
from opd.environments import find, place_of
from opd.environments.records import Tool
from opd.errors import ConfigError
from opd.prompts import PromptTable
from opd.rollouts.episodes.chat import ChatAppender
from opd.rollouts.episodes.spec import EpisodeOptions
from opd.rollouts.episodes.threads import Failed, Overdue, OwnThread


def episode_options(config: PipelineConfig) -> dict[str, EpisodeOptions]:
    """Domain -> how its episodes run, for domains with an environment. Raises: ConfigError for a name that is none."""
    return {
        name: EpisodeOptions(
            environment=place_of(domain.environment.name, f"domains.{name}.environment.name"),
            options=domain.environment.options,
            max_turns=domain.environment.max_turns,
            max_tokens=domain.environment.max_tokens,
            max_turn_tokens=config.rollout.max_new_tokens,
            step_timeout_s=domain.environment.step_timeout_s,
            max_broken=domain.environment.max_broken,
            template_date=config.student.template_date,
        )
        for name, domain in config.domains.items()
        if domain.environment is not None
    }


def check_environments(
    config: PipelineConfig,
    prompts: Mapping[str, PromptTable],
    tokenizer: Any,
    stop_token_ids: Sequence[int],
) -> None:
    """Make and close one environment of each domain, and prove the chat template where a domain's prompts are messages.

    Raises: ConfigError; ModelError if the template cannot append.
    """
    episodes = episode_options(config)
    for name, options in episodes.items():
        asyncio.run(_try(name, options))
    if any(not isinstance(prompts[name][0].text, str) for name in episodes):
        ChatAppender(tokenizer, stop_token_ids, config.student.template_date)


async def _try(domain: str, options: EpisodeOptions) -> None:
    """Raises: ConfigError for an environment that cannot be made with its options, or whose tools are none."""
    make = find(options.environment, f"domains.{domain}.environment.name")
    thread = OwnThread(options.step_timeout_s)
    try:
        environment = await thread.call("the class", lambda: make(**options.options))
        tools = await thread.call("tools", lambda: environment.tools)
        await thread.call("close", environment.close)
    except (Failed, Overdue) as error:
        raise ConfigError.at(
            f"domains.{domain}.environment.options",
            found=str(error),
            wanted=f"keyword arguments of {options.environment}, which is made and closed once to try them",
            fix="correct the options; if making it takes long, raise step_timeout_s",
        ) from None
    finally:
        thread.end()
    if not isinstance(tools, tuple | list) or not all(isinstance(tool, Tool) for tool in tools):
        raise ConfigError.at(
            f"domains.{domain}.environment.name",
            found=f"tools = {tools!r:.60}",
            wanted="a tuple of opd.environments.records.Tool, empty if there are none",
            fix=f"correct {options.environment}",
        )
