"""Try everything that a pipeline's episodes need, before any compute: an environment's class, its options, its tools and a few
of its tasks; an agent's program; and the chat template."""

from __future__ import annotations

import asyncio
import re
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from opd.config import PipelineConfig
from opd.config.context import ContextConfig
from opd.config.domains import DomainConfig, EnvironmentConfig
from opd.environments import find_environment, find_import_name
from opd.errors import ConfigError, PromptError
from opd.evaluation.evaluator import DomainExam
from opd.prompts import PromptTable
from opd.prompts.conversation import Messages
from opd.records.environments import Tool
from opd.records.types import Prompt
from opd.rollouts.endpoint.options import AgentOptions
from opd.rollouts.endpoint.program import search_path
from opd.rollouts.episodes.chat import ChatAppender
from opd.rollouts.episodes.compaction import CompactionOptions
from opd.rollouts.episodes.spec import EpisodeOptions
from opd.rollouts.episodes.threads import CallFailed, CallOverdue, OwnThread
from opd.rollouts.episodes.tools import explain_bad_tools
from pipelines.inputs.guards import check_guards, guard_of_domain
from pipelines.inputs.sub_agents import check_sub_agents, sub_agents_options

_INTERPRETER = re.compile(r"python[\d.]*|(ba|da|z)?sh|node|perl|ruby")
"""Programs whose first argument is a script, unless it begins with a dash."""


def episode_options(config: PipelineConfig, judged: Path | None = None) -> dict[str, EpisodeOptions | AgentOptions]:
    """Return domain -> options of its episodes, for domains with an environment or an agent.

    `judged`: the run's file with answers of the guard's judge. Raises: ConfigError for an unknown name of an environment, or
    for rules that cannot be read.
    """
    options: dict[str, EpisodeOptions | AgentOptions] = {}
    for name, domain in config.domains.items():
        if domain.environment is not None:
            options[name] = _environment_options(config, name, domain, judged)
        elif domain.agent is not None:
            options[name] = _agent_options(config, name, domain, judged)
    return options


def _environment_options(
    config: PipelineConfig, name: str, domain: DomainConfig, judged: Path | None
) -> EpisodeOptions:
    environment = domain.environment
    assert environment is not None
    return EpisodeOptions(
        environment=find_import_name(environment.name, f"domains.{name}.environment.name"),
        options=environment.options,
        max_turns=environment.max_turns,
        max_tokens=environment.max_tokens,
        max_turn_tokens=config.rollout.max_new_tokens,
        step_timeout_s=environment.step_timeout_s,
        max_broken=environment.max_broken,
        template_date=config.student.template_date,
        tool_call_parser=config.student.tool_call_parser,
        chat_template_kwargs=config.chat_template_kwargs_of(name),
        compaction=_compaction_options(config, environment.context),
        guard=guard_of_domain(config, domain, judged),
        sub_agents=sub_agents_options(config, name, environment),
    )


def _agent_options(config: PipelineConfig, name: str, domain: DomainConfig, judged: Path | None) -> AgentOptions:
    """Return the options of a domain's agent. Files of the current directory in its command become absolute paths, because the
    program runs in another directory."""
    agent = domain.agent
    assert agent is not None
    return AgentOptions(
        command=tuple(str(Path(word).absolute()) if Path(word).is_file() else word for word in agent.command),
        env=agent.env,
        inherit=tuple(agent.inherit),
        render=agent.render,
        metadata=tuple(agent.metadata),
        verifier=agent.verifier,
        timeout_s=agent.timeout_s,
        parallel=agent.parallel,
        max_calls=agent.max_calls,
        max_tokens=agent.max_tokens,
        max_turn_tokens=config.rollout.max_new_tokens,
        max_broken=agent.max_broken,
        template_date=config.student.template_date,
        tool_call_parser=config.student.tool_call_parser,
        chat_template_kwargs=config.chat_template_kwargs_of(name),
        guard=guard_of_domain(config, domain, judged),
    )


def _compaction_options(config: PipelineConfig, context: ContextConfig | None) -> CompactionOptions | None:
    if context is None:
        return None
    options = context.model_dump() | {"max_tokens": context.max_tokens or config.rollout.max_new_tokens}
    return CompactionOptions(**options)


def check_environments(
    config: PipelineConfig, prompts: Mapping[str, PromptTable], tokenizer: Any, stop_token_ids: Sequence[int]
) -> None:
    """Check environments, agents' programs, guards, sub-agents and the chat template, as far as the pipeline uses them.

    One environment of each domain is made and closed. The chat template is proven if prompts are messages, or if a program
    sends messages. Raises: ConfigError; ModelError if turns cannot be appended to the template's text, if an environment has
    tools and the student's calls cannot be read, or if no summary can be asked for after the results of calls.
    """
    episodes = episode_options(config)
    tools: dict[str, list[str]] = {}
    for name, options in episodes.items():
        if isinstance(options, AgentOptions):
            _refuse_missing(name, options)
            _refuse_slow(name, options, config.cluster.phase_timeout_s)
        else:
            _refuse_late_compaction(name, options, config.rollout.max_model_len)
            tools[name] = asyncio.run(_try_environment(name, options))
    check_guards({name: options.guard for name, options in episodes.items() if options.guard is not None}, tools)
    appender = None
    if any(_needs_template(options, prompts[name], tokenizer) for name, options in episodes.items()):
        student = config.student
        appender = ChatAppender(
            tokenizer, stop_token_ids, student.template_date, student.tool_call_parser, student.chat_template_kwargs
        )
    for name, domain in config.domains.items():
        section = domain.environment
        if section is None or not (tools[name] or section.sub_agents):
            continue
        chat = None if isinstance(prompts[name][0].text, str) else appender
        if section.sub_agents:
            check_sub_agents(name, section, tools, chat)
        if chat is not None:
            _ = chat.format  # raises if nobody reads the calls
            if section.context is not None:
                chat.prove_note()


def refuse_other_tasks(
    config: PipelineConfig, prompts: Mapping[str, PromptTable], exams: Mapping[str, DomainExam]
) -> None:
    """Refuse prompts that are no tasks of the domain's environment. Raises: PromptError.

    The first task of the training prompts and of the exam is begun. If that fails, one in the middle and the last one are
    tried as well; they are refused only if all fail, because a single bad row breaks just its own episode.
    """
    for name, domain in config.domains.items():
        environment = domain.environment
        if environment is None:
            continue
        if not environment.replay:  # a replay plays no episode in training
            begin_first_task(prompts[name].rows.label, environment, prompts[name])
        if name in exams:
            begin_first_task(f"domains.{name}.eval", environment, exams[name].prompts)


def begin_first_task(
    where: str, environment: EnvironmentConfig, prompts: PromptTable | Sequence[Prompt]
) -> tuple[str | Messages, Sequence[Tool]]:
    """Begin the first task, or if that fails one in the middle or the last one, and return its first observation and tools.

    Raises: PromptError, at `where`, if none can be begun.
    """
    class_path, problem = find_import_name(environment.name, where), ""
    for index in sorted({0, len(prompts) // 2, len(prompts) - 1}):
        try:
            return asyncio.run(_begin_task(class_path, environment, prompts[index]))
        except (CallFailed, CallOverdue) as error:
            problem = problem or f"prompt {prompts[index].id}: {error}"
    raise PromptError.at(
        where,
        found=problem,
        wanted=f"tasks that {class_path} can begin: it gets the `metadata` of each row",
        fix="correct the rows (`opd environments tasks` makes them), or the environment's name, or `reset` of your own class",
    )


async def _begin_task(
    environment_name: str, config: EnvironmentConfig, prompt: Prompt
) -> tuple[str | Messages, Sequence[Tool]]:
    """Begin and close an episode of this task, and return its first observation and tools. Raises: CallFailed, CallOverdue."""
    make = find_environment(environment_name, "environment")
    thread = OwnThread(config.step_timeout_s)
    try:
        environment = await thread.call("the class", lambda: make(**config.options))
        try:
            observation = await thread.call("reset", environment.reset, prompt.metadata, 0)
            return observation, await thread.call("tools", lambda: environment.tools)
        finally:
            await thread.call("close", environment.close)
    finally:
        thread.end_when_idle()


def _needs_template(options: EpisodeOptions | AgentOptions, prompts: PromptTable, tokenizer: Any) -> bool:
    """Return True if a domain's episodes go through the student's chat template."""
    if isinstance(options, AgentOptions):
        return options.uses_template(tokenizer)
    return not isinstance(prompts[0].text, str)


def _refuse_missing(domain: str, options: AgentOptions) -> None:
    """Refuse a program that does not exist, and an interpreter whose script does not exist. Raises: ConfigError."""
    program, *arguments = options.command
    if shutil.which(program, path=options.env.get("PATH", search_path())) is None:
        raise ConfigError.at(
            f"domains.{domain}.agent.command",
            found=f"{program!r:.80}, which is no program",
            wanted="a program of PATH or of the current directory, and its arguments",
            fix="correct the command, make the file executable, or set PATH under agent.env",
        )
    script = next(iter(arguments), "-")
    if _INTERPRETER.fullmatch(Path(program).name) and not script.startswith("-") and not Path(script).is_file():
        raise ConfigError.at(
            f"domains.{domain}.agent.command",
            found=f"{script!r:.80}, which is no file",
            wanted=f"a script for {program}, relative to the current directory",
            fix="correct the path, or start `opd` in the directory that has it",
        )


def _refuse_slow(domain: str, options: AgentOptions, phase_timeout_s: float) -> None:
    """Refuse a program that may take longer than the phase that waits for it. Raises: ConfigError."""
    if options.timeout_s >= phase_timeout_s:
        raise ConfigError.at(
            f"domains.{domain}.agent.timeout_s",
            found=f"{options.timeout_s:g}",
            wanted=f"less than cluster.phase_timeout_s, {phase_timeout_s:g}: a step waits for its slowest episode",
            fix="lower it, or raise cluster.phase_timeout_s",
        )


def _refuse_late_compaction(domain: str, options: EpisodeOptions, context: int) -> None:
    """Refuse a `compact_at` at which the context could be full before the summary is written. Raises: ConfigError."""
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


async def _try_environment(domain: str, options: EpisodeOptions) -> list[str]:
    """Make a domain's environment, close it, and return the names of its tools.

    Raises: ConfigError if it cannot be made with its options, or if its tools have the wrong form.
    """
    make = find_environment(options.environment, f"domains.{domain}.environment.name")
    thread = OwnThread(options.step_timeout_s)
    try:
        environment = await thread.call("the class", lambda: make(**options.options))
        tools = await thread.call("tools", lambda: environment.tools)
        wrong = await thread.call("the class", lambda: explain_bad_tools(tools) or _missing_method(environment))
        if not wrong:
            await thread.call("close", environment.close)
    except (CallFailed, CallOverdue) as error:
        raise ConfigError.at(
            f"domains.{domain}.environment.options",
            found=str(error),
            wanted=f"keyword arguments of {options.environment}, which is made and closed once to try them",
            fix="correct the options; if making it takes long, raise step_timeout_s",
        ) from None
    finally:
        thread.end_when_idle()
    if wrong:
        raise ConfigError.at(
            f"domains.{domain}.environment.name",
            found=wrong,
            wanted="a class with the methods reset, step and close, and with tools that are JSON",
            fix=f"correct {options.environment}",
        )
    return [tool.name for tool in tools]


def _missing_method(environment: Any) -> str:
    """Return the first method that the environment lacks; empty if it has all."""
    missing = [name for name in ("reset", "step", "close") if not callable(getattr(environment, name, None))]
    return f"no method `{missing[0]}`" if missing else ""
