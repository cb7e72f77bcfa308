"""Read the prompts of every expert: how they are read, how long they are, and how their answers are judged."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from experts.model_dir import ModelInfo
from opd.config.domains import DomainEvalConfig
from opd.config.prompts import PromptsConfig
from opd.errors import ConfigError
from opd.prompts import Messages, PromptLine, PromptTable, load_prompts, render_prompt
from opd.settings.yaml_files import parse_yaml, validate_section
from opd.verifiers.numeric import NUMBER
from opd.verifiers.reasoning_gym import ReasoningGym
from pipelines.propose.columns import Columns, find_columns
from pipelines.propose.given import Ask, ExpertAnswer, InitAnswers, Tell, ask_until_valid
from pipelines.propose.text import on_one_line

LOOKED_AT = 500
"""Rows of a file whose answers are looked at, spread over the whole file."""
QUESTIONS = 100
"""Questions that an exam should have: `evaluate.samples`."""
SHARES = (0.2, 0.3, 0.4, 0.5)
"""Shares that are tried where fewer prompts leave one of the two sides empty."""
JUDGES = "numeric, exact_match, last_line, multiple_choice, or none for no exam"
LONGEST = 100
"""Characters of an answer that a model may be expected to write letter by letter."""
MARK = "####"
"""Marker before the number in data sets that show their working."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sources:
    """Files of a domain's prompts, and the names of their columns."""

    training: PromptsConfig
    exam: PromptsConfig | None
    """Prompts that are held out already; None: they have to be held out of the training prompts."""
    settled: bool
    """True if nothing is left to find out about `chat`: the prompts are messages, or the user said so."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DomainFacts:
    """The prompts of one expert."""

    sources: Sources
    table: PromptTable
    """The training prompts, tokenised, before anything is held out."""
    verifier: Any
    """The verifier as a pipeline spells it; None if there is nothing to judge."""
    reason: str
    """Reason for this verifier, or for none."""
    answer_tokens: int
    """Tokens of the longest answer that was looked at."""
    completion_tokens: int
    """The same for completions: 0 if the prompts have none."""


def find_sources(answers: InitAnswers, student: ModelInfo, chat: bool | None) -> dict[str, Sources]:
    """Every domain's files and columns. `chat`: whether texts are what a user says; None: it follows from the chat template.

    This imports nothing large. Raises: PromptError, ConfigError.
    """
    templated = student.chat_template_hash is not None
    return {name: _prompt_sources(expert, chat, templated) for name, expert in answers.experts.items()}


def _prompt_sources(expert: ExpertAnswer, chat: bool | None, templated: bool) -> Sources:
    as_chat = templated if chat is None else chat
    _parse_verifier(expert.verifier)
    columns = find_columns(expert.prompts, expert.columns)
    held_out = None if expert.exam is None else find_columns(expert.exam, expert.columns)
    return Sources(
        training=_prompts_config(expert.prompts, columns, as_chat),
        exam=None if expert.exam is None or held_out is None else _prompts_config(expert.exam, held_out, as_chat),
        settled=columns.messages or chat is not None,
    )


def _prompts_config(path: Path, columns: Columns, as_chat: bool) -> PromptsConfig:
    return PromptsConfig(path=path, columns=dict(columns.renamed), chat=columns.messages or as_chat)


def look_at_domains(
    answers: InitAnswers, sources: Mapping[str, Sources], tokenizer: Any, ask: Ask | None, tell: Tell
) -> dict[str, DomainFacts]:
    """Read and tokenise every prompt, and propose how answers are judged. Raises: PromptError, ConfigError."""

    def choose_verifier(name: str, proposal: str) -> str:
        verifier = answers.experts[name].verifier
        if verifier or ask is None:
            return verifier
        answer = ask_until_valid(ask, tell, f"How are answers of {name} judged ({JUDGES})", _parse_verifier, proposal)
        return "" if answer == proposal else answer

    return {name: _look_at_domain(name, source, tokenizer, choose_verifier) for name, source in sources.items()}


def _look_at_domain(name: str, sources: Sources, tokenizer: Any, chosen: Callable[[str, str], str]) -> DomainFacts:
    """`chosen`: (domain, the verifier that is proposed) -> the verifier that the user wants; empty: the proposed one."""
    sources = _without_chat(sources, tokenizer)
    table = load_prompts(sources.training, name, tokenizer)
    lines = _sample_prompts(table)
    judged = lines if sources.exam is None else _sample_prompts(load_prompts(sources.exam, name, tokenizer))
    verifier, reason = propose_verifier(judged)
    if wish := chosen(name, "none" if verifier is None else on_one_line(verifier)):
        verifier, reason = _parse_verifier(wish), "as you said"
    if verifier is None and sources.exam is not None:
        raise ConfigError.at(
            f"--eval {name}={sources.exam.path}",
            found=reason,
            wanted="answers in a column such as `answer`, or a verifier of yours",
            fix=f"name the column with --columns {name}=PROMPT,ANSWER, or --verifier {name}=..., or leave --eval out",
        )
    return DomainFacts(
        sources=sources,
        table=table,
        verifier=verifier,
        reason=reason,
        answer_tokens=_longest_text(tokenizer, [line.answer for line in lines]),
        completion_tokens=_longest_text(tokenizer, [_text_of(line.completion) for line in lines]),
    )


def _without_chat(sources: Sources, tokenizer: Any) -> Sources:
    """The sources without `chat` where the template puts no words around a text: a model with such a template never chatted."""
    from jinja2 import TemplateError

    if sources.settled or not sources.training.chat:
        return sources
    try:
        around = render_prompt(tokenizer, [{"role": "user", "content": "?"}])
    except (TemplateError, ValueError, TypeError):
        return sources  # whoever reads the prompts refuses the first one, by name
    if any(letter.isalpha() for letter in around):
        return sources
    exam = sources.exam and sources.exam.model_copy(update={"chat": False})
    return replace(sources, training=sources.training.model_copy(update={"chat": False}), exam=exam)


def _parse_verifier(text: str) -> Any:
    """A verifier that the user names. Raises: ConfigError."""
    try:
        verifier = parse_yaml(text)
    except (ValueError, yaml.YAMLError):
        verifier = text
    if verifier in (None, "", "none"):
        return None
    validate_section(DomainEvalConfig, {"holdout": 0.5, "verifier": verifier}, "--verifier")
    return verifier


def _sample_prompts(table: PromptTable) -> list[PromptLine]:
    return table.rows[:: max(1, len(table) // LOOKED_AT)]


def _longest_text(tokenizer: Any, texts: Sequence[str]) -> int:
    filled = [text for text in texts if text]
    return (
        max((len(ids) for ids in tokenizer(filled, add_special_tokens=False)["input_ids"]), default=0) if filled else 0
    )


def propose_verifier(lines: Sequence[PromptLine]) -> tuple[Any, str]:
    """A verifier as a pipeline spells it, and why; None if no verifier can judge such answers."""
    answers = [line.answer.strip() for line in lines]
    if not any(answers):
        return None, "the prompts have no answers"
    gym = ReasoningGym()
    if all(line.metadata and not gym.problem(line.answer, line.metadata) for line in lines):
        return "reasoning_gym", "the task's own scoring function, from `metadata`"
    if not all(answers):
        return None, f"{answers.count('')} of {len(answers)} prompts that were looked at have no answer"
    if all(_is_number(answer) for answer in answers):
        return "numeric", "the last number of the response counts"
    letters = [match[1] if (match := re.fullmatch(r"\(?([A-J])[).]?", answer)) else "" for answer in answers]
    if all(letters) and len(set(letters)) > 1:
        return _choice_verifier(max(letters)), "the letter that the response settles on"
    if any("\n" in answer or len(answer) > LONGEST for answer in answers):
        return None, "the answers are free text, which nothing here can judge"
    if any(_shows_working(line) for line in lines):
        return "last_line", "the last line of the response is the answer"
    return "exact_match", "the whole response is the answer; `last_line` if the experts show their working first"


def _is_number(answer: str) -> bool:
    return bool(NUMBER.fullmatch(answer.rpartition(MARK)[2].strip().strip("$€£%")))


def _choice_verifier(last: str) -> Any:
    """The verifier for letters from A to the last one."""
    if last <= "D":
        return "multiple_choice"
    return {"kind": "multiple_choice", "choices": "".join(chr(c) for c in range(ord("A"), ord(last) + 1))}


def _shows_working(line: PromptLine) -> bool:
    """True if the completion has more lines than the answer, which is its last one."""
    lines = _text_of(line.completion).strip().splitlines()
    return len(lines) > 1 and lines[-1].strip() == line.answer.strip()


def _text_of(said: str | Messages | None) -> str:
    """The text of a completion."""
    return said or "" if isinstance(said, str | None) else "".join(message["content"] for message in said)


def choose_share(domains: Mapping[str, DomainFacts]) -> float:
    """The share of prompts to hold out: one for all domains, so that a prompt of two files is on the same side in both.

    As small as gives every exam enough questions, and as large as leaves none without.
    """
    tables = [facts.table for facts in domains.values() if wants_share(facts)]
    fewest = min((len(table) for table in tables), default=QUESTIONS)
    smallest = round(min(SHARES[0], max(0.02, QUESTIONS / fewest)), 2)
    return next(
        (share for share in (smallest, *SHARES) if all(can_split(table, share) for table in tables)), SHARES[-1]
    )


def wants_share(facts: DomainFacts) -> bool:
    """True if the domain's exam is held out of its training prompts."""
    return facts.verifier is not None and facts.sources.exam is None


def can_split(table: PromptTable, share: float) -> bool:
    """True if the share leaves prompts on both sides."""
    return 0 < int(table.held_out(share).sum()) < len(table)
