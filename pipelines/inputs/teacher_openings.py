"""Episodes whose teacher has a prompt of its own: what does not go with one is refused, and both openings of every row are encoded."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from opd.config import PipelineConfig
from opd.errors import ConfigError, ModelError
from opd.prompts import PromptTable
from opd.prompts.conversation import Messages
from opd.prompts.teacher_prompts import (
    TeacherOpenings,
    TeacherPromptSpec,
    TeacherPromptTable,
    load_teacher_prompts,
)
from opd.records.environments import Tool
from opd.rollouts.episodes.chat import ChatAppender
from opd.rollouts.episodes.dialogue import BadObservation, ChatDialogue
from pipelines.inputs.environments import begin_first_task


def refuse_unfit_episodes(config: PipelineConfig, domain: str, key: str) -> None:
    """Refuse a teacher's own prompt, at `key`, for a domain whose rollouts may begin otherwise than with the row's prompt, or in which
    the teacher writes. Raises: ConfigError."""
    section, callers = config.domains[domain], _list_callers(config, domain)
    environment = section.environment
    if section.agent is not None:
        found = f"domain {domain} with an agent's program, which writes what the student reads"
    elif environment is not None and environment.replay:
        found = f"domains.{domain}.environment.replay, whose prompts have turns in them"
    elif environment is not None and environment.context is not None:
        found = f"domains.{domain}.environment.context, by which a summary takes the prompt's place"
    elif environment is not None and environment.teacher_turns is not None:
        found = f"domains.{domain}.environment.teacher_turns, which the teacher writes after the student's prompt"
    elif callers:
        found = f"sub-agents of domain {domain}, whose prompts the student writes: {', '.join(callers)}"
    else:
        return
    raise ConfigError.at(
        key,
        found=f"a prompt of its own, and {found}",
        wanted="domains in which the student answers once, or plays whole episodes that begin with the row's prompt",
        fix=f"leave the prompt out, or that key; or give domain {domain} an expert without a prompt",
    )


def _list_callers(config: PipelineConfig, domain: str) -> list[str]:
    """Return the keys of tools that start sub-agents, in this domain or for its experts to score."""
    return [
        f"domains.{name}.environment.sub_agents.{tool}"
        for name, section in config.domains.items()
        for tool, agent in (section.environment.sub_agents if section.environment else {}).items()
        if domain in (name, agent.domain)
    ]


def load_openings(
    config: PipelineConfig, spec: TeacherPromptSpec, prompts: PromptTable, stop_token_ids: Sequence[int]
) -> TeacherOpenings:
    """Encode the openings of a domain's episodes, as the student reads them and as the teacher of `spec` does.

    `stop_token_ids` end a turn of the student. Raises: PromptError, also for a row for which there is no opening; ConfigError for a
    template that cannot hold a dialogue, or an environment that begins an episode with a text.
    """
    tools = _read_tools(config, spec, prompts)
    student = replace(
        spec,
        key=f"domains.{prompts.domain}.prompts",
        config=None,
        tokenizer=spec.student_tokenizer,
        student_variables=config.chat_template_kwargs_of(prompts.domain),
        text=config.effort_text_of(prompts.domain),
    )

    def load(side: TeacherPromptSpec) -> TeacherPromptTable:
        is_text = isinstance(prompts[0].text, str)
        encode = None if is_text else _make_encoder(side, config.student.tool_call_parser, tools, stop_token_ids)
        return load_teacher_prompts(replace(side, has_turns=True, encode_opening=encode), prompts)

    return TeacherOpenings(student=load(student), teacher=load(spec))


def _read_tools(config: PipelineConfig, spec: TeacherPromptSpec, prompts: PromptTable) -> Sequence[Tool]:
    """Return the tools of a domain's environment. Raises: PromptError; ConfigError if `reset` returns a text."""
    environment = config.domains[prompts.domain].environment
    assert environment is not None
    observation, tools = begin_first_task(prompts.rows.label, environment, prompts)
    if observation:
        raise ConfigError.at(
            spec.key,
            found=f"a prompt of its own, and environment {environment.name}, which begins an episode with {observation!r:.60}",
            wanted="an environment whose `reset` returns an empty text, so that an episode begins with the prompt of its row",
            fix="write that text into the prompts of the rows",
        )
    return tools


def _make_encoder(
    spec: TeacherPromptSpec, parser: str, tools: Sequence[Tool], stop_token_ids: Sequence[int]
) -> Callable[[Messages], list[int]]:
    """Return a function that encodes the messages before the first turn, with the tools, by the chat template of `spec`. Raises:
    ConfigError."""
    own = {} if spec.config is None else spec.config.template_kwargs
    try:
        appender = ChatAppender(spec.tokenizer, stop_token_ids, spec.day, parser, {**spec.student_variables, **own})
        if tools:
            _ = appender.format  # raises if nobody reads the calls
    except ModelError as error:
        raise ConfigError.at(
            spec.key,
            found=f"a chat template that cannot hold the episode: {error}",
            wanted="one that appends turns and messages, and lists tools, as the student's does",
            fix=f"correct {spec.key}.template, or leave it out",
        ) from None
    dialogue = ChatDialogue(appender, tools)

    def encode(messages: Messages) -> list[int]:
        try:
            return dialogue.encode_opening(messages, "")
        except BadObservation as error:
            raise ValueError(str(error)) from None

    return encode
