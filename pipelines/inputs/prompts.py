"""Read the training prompts and exams of every domain, split a file that serves both, and check that they share no question."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np

from experts.registry import Registry, default_root
from opd.config import PipelineConfig
from opd.config.domains import DomainConfig, DomainEvalConfig, RegisteredExperts
from opd.config.prompts import PromptsConfig, as_prompts_config
from opd.config.verifiers import JudgeConfig
from opd.errors import ConfigError, PromptError
from opd.evaluation.evaluator import DomainExam, Reward
from opd.prompts import PromptTable, collect_notices, is_here, load_prompts
from opd.records.types import Prompt
from opd.text import Tell
from opd.verifiers import build_verifier, find_problem

EXAMPLES = 3
"""Number of prompts that an error or notice names."""
TRIED = 1000
"""Number of prompts of a domain that the verifier tries beforehand, evenly spread, because a file may have a million. If another one
cannot be judged, it counts as failed when its turn comes."""


def load_training(
    config: PipelineConfig, sources: Mapping[str, Path | PromptsConfig], tokenizer: Any, tell: Tell = lambda _: None
) -> dict[str, PromptTable]:
    """Return domain -> prompts to train on, without those that `eval.holdout` keeps back and those that are too long.

    `sources`: domain -> source of its prompts. `tell` gets sentences for the user, as about prompts that are too long.

    Raises: PromptError if a source cannot be read, or if nothing is left to train on.
    """
    training = {}
    for name, source in sources.items():
        prompts = read_prompts(config, name, source, tokenizer, tell)
        exam = config.domains[name].eval
        if exam is not None and exam.holdout is not None:
            prompts = _split_sides(prompts, exam.holdout, held_out=False)
        training[name] = _short_enough(source, prompts, tell)
    return training


def load_exams(
    config: PipelineConfig,
    tokenizer: Any,
    domains: Sequence[str] | None = None,
    tell: Tell = lambda _: None,
    *,
    samples: int | None = None,
    sources: Mapping[str, Path | PromptsConfig] | None = None,
    effort: bool = True,
) -> dict[str, DomainExam]:
    """Return the exam of every domain (or of those named) with an `eval`: its first `samples` held-out prompts and its verifier.

    `samples` defaults to `evaluate.samples`; `tell` is explained at `load_training`. `sources`: domain -> training prompts out
    of which an exam with `holdout` is taken; by default those that the pipeline or the registry names. `effort`: see `read_prompts`.
    Raises: PromptError if prompts cannot be read or judged; ConfigError if a verifier's function does not exist.
    """
    exams = {}
    for name, domain in config.domains.items():
        if domain.eval is None or (domains is not None and name not in domains):
            continue
        source = _find_exam_source(config, name, domain.eval, sources)
        # If the source also serves training, its notices have been told there.
        heard = tell if domain.eval.prompts else lambda _: None
        prompts = read_prompts(config, name, source, tokenizer, heard, effort=effort)
        if domain.eval.holdout is not None:
            prompts = _split_sides(prompts, domain.eval.holdout, held_out=True)
        prompts = _short_enough(source, prompts, tell)
        verifier = Reward() if domain.has_episodes else build_verifier(domain.eval.verifier, name)
        exams[name] = DomainExam(tuple(prompts[: samples or config.evaluate.samples]), verifier)
        refuse_unjudgeable(prompts.rows.label, exams[name], domain.eval)
    return exams


def _find_exam_source(
    config: PipelineConfig, name: str, exam: DomainEvalConfig, sources: Mapping[str, Path | PromptsConfig] | None
) -> Path | PromptsConfig:
    """Return the source of a domain's questions. `sources`: as in `load_exams`."""
    if exam.prompts is not None:
        return exam.prompts
    if sources is not None:
        return sources[name]
    domain = config.domains[name]
    return find_prompts(name, domain, None if domain.prompts else registered_prompts(config, name))


def load_own_exams(
    config: PipelineConfig,
    tokenizer: Any,
    exams: Mapping[str, DomainExam],
    sources: Mapping[str, Path | PromptsConfig] | None = None,
) -> dict[str, DomainExam]:
    """Return exams of `load_exams` with the same questions in the tokens of an expert's own tokenizer, by its chat template.

    `sources`: as in `load_exams`. Raises: PromptError if its chat template refuses a question.
    """
    own_exams = {}
    for name, exam in exams.items():
        settings = config.domains[name].eval
        assert settings is not None, "only domains with an `eval` have an exam"
        prompts = read_prompts(config, name, _find_exam_source(config, name, settings, sources), tokenizer)
        index_by_row = {int(number): index for index, number in enumerate(prompts.rows.row_numbers())}
        # Which questions are too long, and hence left out, is counted in the student's tokens.
        indices = (index_by_row[int(prompt.id.rpartition("/")[2])] for prompt in exam.prompts)
        own_exams[name] = replace(exam, prompts=tuple(prompts[index] for index in indices))
    return own_exams


def read_prompts(
    config: PipelineConfig,
    domain: str,
    source: Path | PromptsConfig,
    tokenizer: Any,
    tell: Tell = lambda _: None,
    *,
    effort: bool = True,
) -> PromptTable:
    """Return a domain's prompts in the student's tokens. Raises: PromptError.

    `tell` gets a sentence about each part of the source that is not read, or not read in the obvious way. Without `effort` the prompts
    have no tag of the domain's effort.
    """
    student = config.student
    if config.domains[domain].has_episodes and is_here(source):
        # In a domain with episodes the environment or program decides on tools and variables of the template, not the file.
        source = as_prompts_config(source).without_columns("tools", "chat_template_kwargs")
    columns = find_rubric_columns(config.domains[domain])
    # A path alone that does not exist stays one: as a mapping it would be looked for in the hub.
    if columns and (isinstance(source, PromptsConfig) or is_here(source)):
        source = as_prompts_config(source).with_more_columns(columns)
    variables = config.chat_template_kwargs_of(domain, effort=effort)
    text = config.effort_text_of(domain) if effort else ""
    prompts = load_prompts(source, domain, tokenizer, student.template_date, variables, text)
    for notice in collect_notices(source, prompts, tokenizer, student.template_date, variables):
        tell(notice)
    return prompts


def find_rubric_columns(domain: DomainConfig) -> tuple[str, ...]:
    """Return the columns of a domain's rows that are read for the rubric of its judge alone."""
    verifier = None if domain.eval is None else domain.eval.verifier
    return verifier.row_columns if isinstance(verifier, JudgeConfig) else ()


def refuse_unread_variables(config: PipelineConfig, tokenizer: Any) -> None:
    """Refuse variables that the student's chat template does not read, such as misspelt ones. Raises: ConfigError."""
    sections = {"student.chat_template_kwargs": dict(config.student.chat_template_kwargs)} | {
        f"efforts.{name}.chat_template_kwargs": effort.list_variables(name) for name, effort in config.efforts.items()
    }
    for key, variables in sections.items():
        unread = find_unread_variable(variables, tokenizer)
        if unread is not None:
            otherwise = "leave it out" if key.startswith("student.") else "give `text` in its place"
            raise ConfigError.at(
                f"{key}.{unread}",
                found=f"a variable that the chat template of {config.student.model} does not read",
                wanted="variables of this template" if tokenizer.chat_template else "a student with a chat template",
                fix=f"correct the name, or {otherwise}",
            )


def refuse_equal_efforts(config: PipelineConfig, tables: Mapping[str, PromptTable]) -> None:
    """Refuse efforts of which the student's prompts do not tell, because their tags change nothing. `tables`: training prompts by domain.

    Raises: PromptError.
    """
    domains = [(*config.split_effort(name), name) for name in tables]
    for (domain, effort, name), (other_domain, other, other_name) in combinations(domains, 2):
        if domain != other_domain or effort is None or other is None or effort == other:
            continue
        table = tables[name]
        equal = table.find_equal_row(tables[other_name])
        if equal is not None:
            raise PromptError.at(
                f"efforts.{effort}, efforts.{other}",
                found=f"the same prompt for both, such as {table[equal].id} of {table.rows.label}",
                wanted="tags that the prompts show: a chat template that reads efforts.*.chat_template_kwargs, or efforts.*.text",
                fix=f'give each effort a text, such as `{effort}: {{text: "{effort} "}}`',
            )


def find_unread_variable(variables: Mapping[str, Any], tokenizer: Any) -> str | None:
    """Return the first of these variables that the tokenizer's chat template does not read; None if it reads all."""
    return next((name for name in variables if name not in str(tokenizer.chat_template or "")), None)


def find_prompts(name: str, domain: DomainConfig, registered: Path | None) -> Path | PromptsConfig:
    """Return the domain's own prompts, else those that its expert was registered with. Raises: ConfigError if it has none."""
    source = domain.prompts or registered
    if source is None:
        raise ConfigError.at(
            f"domains.{name}.prompts",
            found="nothing, and no expert that was registered with prompts",
            wanted="a file of prompts, or another source",
            fix=f"set domains.{name}.prompts",
        )
    return source


def registered_prompts(config: PipelineConfig, domain: str, *, only_here: bool = False) -> Path | None:
    """Return the prompts that the domain's expert was registered with. In a merge, `routes.py` decides which expert that is.

    With `only_here`, experts that are missing in this machine's registry are skipped. Raises: RegistryError.
    """
    if not isinstance(config.experts, RegisteredExperts):
        return None
    registry = Registry(config.registry or default_root())
    names = registry.names() if config.experts.use == "all" else config.experts.use
    named = config.domains[domain].teachers
    if isinstance(named, str):
        names = [named]
    elif named is not None:
        names = [max(sorted(named), key=lambda name: named[name])]
    experts = [registry.get(name) for name in names if not only_here or name in registry.names()]
    sources = [e.prompts for e in experts if named is not None or e.domain in (domain, config.split_effort(domain)[0])]
    return Path(sources[0]) if sources and sources[0] else None


def refuse_leaks(exams: Mapping[str, DomainExam], training: Mapping[str, PromptTable]) -> None:
    """Refuse exams with a question that any domain trains on.

    Two prompts are the same if their token ids are equal; in a domain with an environment the metadata, which define the task,
    have to be equal too. Prompts without text are ignored: they are all equal, and another check reports them. Raises:
    PromptError with the counts of every pair of domains that share prompts.
    """
    ids_by_task: dict[tuple[Any, ...], dict[str, str]] = {}
    questions = [question for exam in exams.values() for question in exam.prompts]
    for domain, prompts in training.items():
        for prompt in prompts.select_equal_prompts(questions):
            if prompt.token_ids:
                ids_by_task.setdefault(_task_key(prompt, exams), {}).setdefault(domain, prompt.id)
    shared: dict[tuple[str, str], list[str]] = {}
    for domain, exam in exams.items():
        for prompt in exam.prompts:
            for trained, prompt_id in ids_by_task.get(_task_key(prompt, exams), {}).items():
                shared.setdefault((domain, trained), []).append(f"question {prompt.id} is training prompt {prompt_id}")
    if not shared:
        return
    counts = [
        f"{len(pairs)} of the {len(exams[domain].prompts)} questions of {domain} are training prompts of {trained}"
        for (domain, trained), pairs in shared.items()
    ]
    examples = [pair for pairs in shared.values() for pair in pairs][:EXAMPLES]
    raise PromptError.at(
        f"domains.{next(iter(shared))[0]}.eval",
        found="; ".join(counts) + f" (for example, counted from 0: {', '.join(examples)})",
        wanted="questions that are never trained on",
        fix="delete them from one of the two files; to split one file, give `eval: {holdout: 0.1}` and no eval.prompts",
    )


def _task_key(prompt: Prompt, exams: Mapping[str, DomainExam]) -> tuple[Any, ...]:
    """Return a key that is equal for prompts that are the same question."""
    acts = prompt.domain in exams and isinstance(exams[prompt.domain].verifier, Reward)
    return (*prompt.token_ids, json.dumps(prompt.metadata, sort_keys=True) if acts else "")


def room_warnings(exams: Mapping[str, DomainExam], room: int) -> list[str]:
    """Return a sentence for each domain with questions that have no text, or leave no room for an answer in `room` tokens."""
    warnings = []
    for domain, exam in exams.items():
        lengths = [len(p.token_ids) for p in exam.prompts]
        blank, too_long = sum(n == 0 for n in lengths), sum(n >= room for n in lengths)
        group = f"of the {len(lengths)} questions of {domain}"
        if blank:
            warnings.append(f"{blank} {group} have no text; they count as wrong")
        if too_long:
            warnings.append(
                f"{too_long} {group} leave no room for an answer in rollout.max_model_len = {room}; they count as wrong"
            )
    return warnings


def _short_enough(source: Path | PromptsConfig, prompts: PromptTable, tell: Tell) -> PromptTable:
    """Return the prompts that are not longer than `max_prompt_tokens`. Raises: PromptError if there are none."""
    room = as_prompts_config(source).max_prompt_tokens
    if room is None:
        return prompts
    long = prompts.lengths > room
    count = int(np.count_nonzero(long))
    if count == len(prompts):
        raise PromptError.at(
            prompts.rows.label,
            found=f"no prompt of {room} tokens or fewer; the shortest has {prompts.lengths.min()}",
            wanted="some within prompts.max_prompt_tokens",
            fix="raise it or leave it out",
        )
    if count:
        tell(
            f"{prompts.rows.label}: {count} of {len(prompts)} prompts of {prompts.domain} have more than max_prompt_tokens = "
            f"{room} tokens and are left out: {example_ids(prompts, long)}"
        )
    return prompts.select_prompts(~long)


def example_ids(prompts: PromptTable, mask: Any) -> str:
    """Return the ids of the first few prompts for which `mask` is true, for messages."""
    return ", ".join(prompts.prompt_ids(mask, EXAMPLES)) + (" ..." if np.count_nonzero(mask) > EXAMPLES else "")


def _split_sides(prompts: PromptTable, share: float, *, held_out: bool) -> PromptTable:
    side = prompts.select_prompts(prompts.held_out(share) == held_out)
    if not len(side):
        raise PromptError.at(
            prompts.rows.label,
            found=f"{len(prompts)} prompts, of which eval.holdout {share:g} leaves none for {'the exam' if held_out else 'training'}",
            wanted="some on either side",
            fix="give more prompts, another share, or two files",
        )
    return side


def refuse_unrewardable(
    config: PipelineConfig,
    prompts: Mapping[str, PromptTable],
    exams: Mapping[str, DomainExam],
    preferred: Collection[str] = (),
) -> None:
    """Refuse a rewarded domain with a training prompt that its verifier cannot judge, or must not judge. A discriminator judges the
    domains in `preferred`. Raises: PromptError."""
    if config.objective.reward is None:
        return
    for name, domain in config.domains.items():
        if not domain.is_rewarded or domain.has_episodes or name in preferred:
            continue
        table = prompts[name]
        for index in range(0, len(table), max(1, len(table) // TRIED)):
            prompt = table[index]
            problem = find_problem(exams[name].verifier, prompt)
            if problem:
                raise PromptError.at(
                    f"{table.rows.label}: prompt {prompt.id}",
                    found=problem,
                    wanted=f"what the verifier of domains.{name}.eval needs to reward responses in training",
                    fix=f"add it to the training prompts, or set domains.{name}.reward to false",
                )


def refuse_unjudgeable(key: str, exam: DomainExam, config: DomainEvalConfig) -> None:
    """Refuse questions that the verifier cannot judge, or must not judge because it would run code from a file.

    Raises: PromptError.
    """
    verifier = config.verifier if isinstance(config.verifier, str) else config.verifier.kind
    problems = [(p.id, problem) for p in exam.prompts if (problem := find_problem(exam.verifier, p))]
    if problems:
        prompt_id, problem = problems[0]
        raise PromptError.at(
            f"{key}: prompt {prompt_id}",
            found=problem
            + (f" (so have {len(problems)} of {len(exam.prompts)} questions)" if len(problems) > 1 else ""),
            wanted=f"what the verifier `{verifier}` needs to judge an answer",
            fix="correct these lines, or choose another verifier",
        )
