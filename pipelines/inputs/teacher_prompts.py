"""Prompts of teachers' own: what does not go with them is refused, and each teacher gets those of its domains, before any compute."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from opd.config import PipelineConfig
from opd.config.domains import RegisteredExperts
from opd.config.prompts import PromptsConfig, as_prompts_config
from opd.config.teacher_prompts import OWN_COLUMNS, TeacherPromptConfig
from opd.config.teachers import FlightTeachers
from opd.errors import ConfigError, PromptError
from opd.prompts import PromptTable, is_here
from opd.prompts.chat_templates import refuse_runaway_template
from opd.prompts.teacher_prompts import (
    TeacherOpenings,
    TeacherPromptSpec,
    TeacherPromptTable,
    find_leaks,
    load_teacher_prompts,
    load_teacher_tokenizer,
)
from opd.records.types import WeightedTeacher
from opd.settings.suggestions import did_you_mean
from opd.vocabularies.response_encoder import ResponseEncoder
from pipelines.inputs.own_tokens import reads_own_tokens
from pipelines.inputs.prompts import Tell, find_unread_variable
from pipelines.inputs.teacher_openings import load_openings, refuse_unfit_episodes
from pipelines.routes import RoutedExpert

Scoring = Mapping[str, tuple[WeightedTeacher, ...]]
"""Domain -> its teachers."""


def name_prompt(config: PipelineConfig, expert: str) -> str:
    """Return the key of an expert's own prompt in the pipeline."""
    registered = isinstance(config.experts, RegisteredExperts)
    return f"experts.prompts.{expert}" if registered else f"experts.{expert}.prompt"


def refuse_unfit_prompts(config: PipelineConfig, scorers: Mapping[str, RoutedExpert], scoring: Scoring) -> None:
    """Refuse prompts of experts that are not in the merge, of engines that cannot read them, of domains whose episodes they do not open,
    and those longer than the expert's context. Raises: ConfigError."""
    for name, prompt in config.teacher_prompts.items():
        key = name_prompt(config, name)
        if name not in scorers:
            raise ConfigError.at(
                key,
                found=name,
                wanted=f"experts of this pipeline: {', '.join(scorers)}",
                fix=did_you_mean(name, scorers, "remove it"),
            )
        if isinstance(config.engine_of(name), FlightTeachers):
            raise ConfigError.at(
                key,
                found="a prompt of its own with engine flight",
                wanted="an engine that this merge starts, or an API: teachers that are served read what the student reads",
                fix="give the expert another engine, such as {kind: transformers}",
            )
        for domain in (domain for domain, assigned in scoring.items() if name in [a.teacher.name for a in assigned]):
            refuse_unfit_episodes(config, domain, key)
        context, limit = scorers[name].info.context, _find_limit(config, prompt)
        if context is not None and limit > context:
            raise ConfigError.at(
                f"{key}.max_model_len",
                found=str(limit),
                wanted=f"at most {context}, the context of {scorers[name].info.path}",
                fix=f"set it to {context} or less",
            )


def _find_limit(config: PipelineConfig, prompt: TeacherPromptConfig) -> int:
    """Return the most tokens of a teacher's own prompt and the response."""
    return prompt.max_model_len or config.rollout.max_model_len


def load_teacher_tokenizers(
    config: PipelineConfig, tokenizer: Any, own_tokenizers: Mapping[str, Any]
) -> dict[str, Any]:
    """Return expert -> the tokenizer with the chat template of its own prompt, checked; `own_tokenizers` has those of experts with
    tokens of their own. Raises: ConfigError, ModelError."""
    tokenizers = dict(own_tokenizers)
    for name, prompt in config.teacher_prompts.items():
        key = name_prompt(config, name)
        tokenizers[name] = load_teacher_tokenizer(own_tokenizers.get(name, tokenizer), prompt, key)
        if prompt.template is not None:
            refuse_runaway_template(tokenizers[name], prompt.template)
        unread = find_unread_variable(prompt.template_kwargs, tokenizers[name])
        if unread is not None:
            raise ConfigError.at(
                f"{key}.template_kwargs.{unread}",
                found="a variable that the chat template does not read",
                wanted="variables of this template",
                fix="correct the name, or leave it out",
            )
    return tokenizers


def with_teacher_columns(
    config: PipelineConfig, scoring: Scoring, sources: Mapping[str, Path | PromptsConfig]
) -> dict[str, Path | PromptsConfig]:
    """Return domain -> source of its prompts, of which the columns are read, too, that its teachers' own prompts name."""
    changed = dict(sources)
    for domain, assigned in scoring.items():
        prompts = [config.teacher_prompts[a.teacher.name] for a in assigned if a.teacher.name in config.teacher_prompts]
        names = [name for prompt in prompts for name in prompt.more_columns]
        source = sources[domain]
        # A path alone that does not exist stays one: as a mapping it would be looked for in the hub.
        if names and (isinstance(source, PromptsConfig) or is_here(source)):
            changed[domain] = as_prompts_config(source).with_more_columns(names)
    return changed


def build_prompt_spec(
    config: PipelineConfig, expert: str, domain: str, tokenizer: Any, student_tokenizer: Any
) -> TeacherPromptSpec:
    """Return all that decides what an expert with a prompt or tokens of its own reads in a domain. `tokenizer`: of
    `load_teacher_tokenizers`."""
    prompt = config.teacher_prompts.get(expert)
    reads_effort = prompt is None or prompt.effort is not False
    return TeacherPromptSpec(
        key=name_prompt(config, expert),
        config=prompt,
        own_tokens=reads_own_tokens(config, expert),
        tokenizer=tokenizer,
        student_tokenizer=student_tokenizer,
        day=config.student.template_date,
        student_variables=config.chat_template_kwargs_of(domain, effort=reads_effort),
        text=config.effort_text_of(domain) if reads_effort else "",
    )


def add_teacher_prompts(
    config: PipelineConfig,
    tokenizers: Mapping[str, Any],
    encoders: Mapping[str, ResponseEncoder],
    student_tokenizer: Any,
    prompts: Mapping[str, PromptTable],
    scoring: Scoring,
    stop_token_ids: Sequence[int],
    tell: Tell,
) -> dict[str, tuple[WeightedTeacher, ...]]:
    """Return the teachers of each domain, each with its own prompts if it has some.

    `tokenizers`: `load_teacher_tokenizers`. `encoders`: of experts with tokens of their own. `prompts`: the student's, by domain.
    `stop_token_ids` end its turns. `tell` gets a sentence about rows in which a column for teachers stands in the student's prompt.
    Raises: PromptError, ConfigError.
    """

    def add_prompts(domain: str, assigned: WeightedTeacher) -> WeightedTeacher:
        name = assigned.teacher.name
        if name not in tokenizers:
            return assigned
        spec = build_prompt_spec(config, name, domain, tokenizers[name], student_tokenizer)
        if config.domains[domain].environment is not None:
            table: TeacherPromptTable | TeacherOpenings = load_openings(config, spec, prompts[domain], stop_token_ids)
        else:
            table = load_teacher_prompts(spec, prompts[domain])
        if spec.config is not None:
            _refuse_too_long(config, spec.key, spec.config, prompts[domain], table)
            _refuse_leaks(spec.key, spec.config, prompts[domain], tell)
        return replace(assigned, prompts=table, encoder=encoders.get(name))

    return {domain: tuple(add_prompts(domain, a) for a in assigned) for domain, assigned in scoring.items()}


def _refuse_too_long(
    config: PipelineConfig,
    key: str,
    prompt: TeacherPromptConfig,
    prompts: PromptTable,
    table: TeacherPromptTable | TeacherOpenings,
) -> None:
    """Refuse a teacher's prompt after which the longest response, or episode, that the student may write does not fit. Raises:
    PromptError."""
    rollout, limit = config.rollout, _find_limit(config, prompt)
    if isinstance(table, TeacherOpenings):  # an episode may fill the student's context
        own, responses = table.teacher.lengths, rollout.max_model_len - table.student.lengths[prompts.indices]
    else:
        own, responses = table.lengths, np.minimum(rollout.max_new_tokens, rollout.max_model_len - prompts.lengths)
    # A prompt that leaves the student no room for a response is quarantined when it comes.
    needed = np.where(responses > 0, own[prompts.indices] + responses, 0)
    longest = int(np.argmax(needed))
    if needed[longest] > limit:
        raise PromptError.at(
            f"{key}, {prompts.rows.label}: prompt {prompts[longest].id}",
            found=f"{needed[longest]} tokens: {needed[longest] - responses[longest]} of the teacher's prompt, and a response of up "
            f"to {responses[longest]}; so long are {int(np.count_nonzero(needed > limit))} of {len(prompts)}",
            wanted=f"at most {limit}"
            + ("" if prompt.max_model_len else ", which is rollout.max_model_len, because the prompt has no other"),
            fix=f"set {key}.max_model_len to {needed[longest]} or more, or shorten the prompt",
        )


def _refuse_leaks(key: str, prompt: TeacherPromptConfig, prompts: PromptTable, tell: Tell) -> None:
    """Refuse a column for teachers that most prompts of the student have in them. Raises: PromptError.

    An answer is only reported: that of a question about a passage stands there by nature.
    """
    for column, places in find_leaks(prompt, prompts.rows).items():
        if not places:
            continue
        names = [f"{prompts.domain}/{prompts.rows.row_number(place)}" for place in places[:3]]
        fault = f"column `{column}` stands in the student's own prompt in {len(places)} of {len(prompts.rows)} rows, such as {', '.join(names)}"
        if 2 * len(places) > len(prompts.rows) and column not in OWN_COLUMNS:
            raise PromptError.at(
                f"{key}, {prompts.rows.label}",
                found=fault,
                wanted="a column that the student does not read: else the teacher knows nothing more",
                fix=f"take it out of the prompts, or out of {key}",
            )
        tell(f"{key}, {prompts.rows.label}: {fault}")
