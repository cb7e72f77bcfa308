"""Try every environment of a pipeline before any compute: its class, its options, its tools, and the chat template."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

from opd.config import PipelineConfig
from opd.config.context import ContextConfig
from opd.environments import ENVIRONMENTS
from opd.environments.records import Tool
from opd.errors import ConfigError
from opd.prompts import PromptTable
from opd.rollouts.episodes.chat import ChatAppender
from opd.rollouts.episodes.compaction import CompactionOptions
from opd.rollouts.episodes.runner import environment_class
from opd.rollouts.episodes.spec import EpisodeOptions
from opd.rollouts.episodes.threads import Failed, Overdue, OwnThread


def episode_options(config: PipelineConfig) -> dict[str, EpisodeOptions]:
    """Domain -> how its episodes run, for domains with an environment."""
    return {
        name: EpisodeOptions(
            environment=ENVIRONMENTS.get(domain.environment.name, domain.environment.name),
            options=domain.environment.options,
            max_turns=domain.environment.max_turns,
            max_tokens=domain.environment.max_tokens,
            max_turn_tokens=config.rollout.max_new_tokens,
            step_timeout_s=domain.environment.step_timeout_s,
            max_broken=domain.environment.max_broken,
            template_date=config.student.template_date,
            compaction=_compaction(config, domain.environment.context),
        )
        for name, domain in config.domains.items()
        if domain.environment is not None
    }


def _compaction(config: PipelineConfig, context: ContextConfig | None) -> CompactionOptions | None:
    if context is None:
        return None
    options = context.model_dump() | {"max_tokens": context.max_tokens or config.rollout.max_new_tokens}
    return CompactionOptions(**options)


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
        _refuse_unknown(name, options.environment)
        _refuse_late_compaction(name, options, config.rollout.max_model_len)
        asyncio.run(_try(name, options))
    if any(not isinstance(prompts[name][0].text, str) for name in episodes):
        ChatAppender(tokenizer, stop_token_ids, config.student.template_date)


def _refuse_unknown(domain: str, place: str) -> None:
    if ":" not in place:
        raise ConfigError.at(
            f"domains.{domain}.environment.name",
            found=place,
            wanted=f"one of {', '.join(ENVIRONMENTS) or 'none so far'}, or a class of yours as module:Class",
            fix="correct the name",
        )


def _refuse_late_compaction(domain: str, options: EpisodeOptions, context: int) -> None:
    """Raises: ConfigError if the context could be full before the summary is written."""
    compaction = options.compaction
    if compaction is None:
        return
    most = context - options.max_turn_tokens - compaction.max_tokens
    if compaction.compact_at > most:
        raise ConfigError.at(
            f"domains.{domain}.environment.context.compact_at",
            found=str(compaction.compact_at),
            wanted=f"at most {most}: rollout.max_model_len {context}, less a turn of {options.max_turn_tokens} tokens and a "
            f"summary of {compaction.max_tokens}",
            fix="lower it, or raise rollout.max_model_len; observations and the request need room, too",
        )


async def _try(domain: str, options: EpisodeOptions) -> None:
    """Raises: ConfigError for an environment that cannot be made with its options, or whose tools are none."""
    make = environment_class(options.environment, f"domains.{domain}.environment.name")
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
