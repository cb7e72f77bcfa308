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
from opd.text import Tell
from opd.verifiers.numeric import NUMBER
from opd.verifiers.reasoning_gym import ReasoningGym
from pipelines.propose.columns import Columns, find_columns
from pipelines.propose.flags import Ask, ExpertAnswer, InitAnswers, ask_until_valid
from pipelines.propose.text import render_on_one_line

MAX_SAMPLED_ROWS = 500
"""About how many rows of a file are sampled, evenly over the whole file, to see what its answers look like."""
EXAM_QUESTIONS = 100
"""Questions that an exam should have: what a proposal writes as `evaluate.samples`."""
HOLDOUT_SHARES = (0.2, 0.3, 0.4, 0.5)
"""Shares of the prompts to hold out, tried in turn until both sides of every split have a prompt."""
VERIFIER_CHOICES = "numeric, exact_match, last_line, multiple_choice, or none for no exam"
MAX_EXACT_CHARACTERS = 100
"""Longest answer, in characters, that a model may be expected to write exactly; a longer one counts as free text."""
WORKING_MARK = "####"
"""Text before the final number in data sets whose answers show their working, such as GSM8K."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sources:
    """The files of a domain's prompts, and the names of their columns."""

    training: PromptsConfig
    exam: PromptsConfig | None
    """Prompts that are held out already; None: they have to be held out of the training prompts."""
    settled: bool
    """True if `chat` is certain: the prompts are messages, or the user gave it. False if it was guessed from the template."""


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
    """Tokens of the longest answer among the sampled rows; 0 if none has an answer."""
    completion_tokens: int
    """Tokens of the longest completion among the sampled rows; 0 if none has a completion."""


def find_sources(answers: InitAnswers, student: ModelInfo, chat: bool | None) -> dict[str, Sources]:
    """Return domain -> its files and columns. `chat` says whether a text is what a user says; None: it is if the student has a chat
    template. This imports nothing large. Raises: PromptError, ConfigError.
    """
    has_template = student.chat_template_hash is not None
    return {name: _find_domain_sources(expert, chat, has_template) for name, expert in answers.experts.items()}


def find_keep_source(answers: InitAnswers, student: ModelInfo, chat: bool | None) -> PromptsConfig | None:
    """Return the source of general prompts; None if there are none. `chat` and what is raised: as `find_sources`."""
    if answers.keep is None:
        return None
    as_chat = student.chat_template_hash is not None if chat is None else chat
    return _make_prompts_config(answers.keep, find_columns(answers.keep, ()), as_chat)


def _find_domain_sources(expert: ExpertAnswer, chat: bool | None, has_template: bool) -> Sources:
    as_chat = has_template if chat is None else chat
    _parse_verifier(expert.verifier)  # only to refuse a wrong one now, before anything slow
    columns = find_columns(expert.prompts, expert.columns)
    held_out = None if expert.exam is None else find_columns(expert.exam, expert.columns)
    return Sources(
        training=_make_prompts_config(expert.prompts, columns, as_chat),
        exam=None if expert.exam is None or held_out is None else _make_prompts_config(expert.exam, held_out, as_chat),
        settled=columns.messages or chat is not None,
    )


def _make_prompts_config(path: Path, columns: Columns, as_chat: bool) -> PromptsConfig:
    return PromptsConfig(path=path, columns=dict(columns.renamed), chat=columns.messages or as_chat)


def read_domains(
    answers: InitAnswers, sources: Mapping[str, Sources], tokenizer: Any, ask: Ask | None, tell: Tell
) -> dict[str, DomainFacts]:
    """Read and tokenise every prompt, and propose how answers are judged. `ask` is None if nobody can be asked. Raises: PromptError,
    ConfigError."""

    def choose_verifier(name: str, proposal: str) -> str:
        verifier = answers.experts[name].verifier
        if verifier or ask is None:
            return verifier
        question = f"How are answers of {name} judged ({VERIFIER_CHOICES})"
        answer = ask_until_valid(ask, tell, question, _parse_verifier, proposal)
        return "" if answer == proposal else answer

    facts: dict[str, DomainFacts] = {}
    first_of: dict[str, str] = {}
    for name, source in sources.items():
        # Experts that differ in their effort alone have one file, which is read once.
        first = first_of.setdefault(answers.efforts[name].domain if name in answers.efforts else name, name)
        facts[name] = facts[first] if first in facts else _read_domain(name, source, tokenizer, choose_verifier)
    return facts


def _read_domain(
    name: str, sources: Sources, tokenizer: Any, choose_verifier: Callable[[str, str], str]
) -> DomainFacts:
    """Read one domain. `choose_verifier` takes the domain and the proposed verifier, and returns the verifier that the user wants,
    empty for the proposed one. Raises: as `read_domains`."""
    sources = _drop_needless_chat(sources, tokenizer)
    table = load_prompts(sources.training, name, tokenizer)
    lines = _sample_prompts(table)
    exam_lines = lines if sources.exam is None else _sample_prompts(load_prompts(sources.exam, name, tokenizer))
    verifier, reason = propose_verifier(exam_lines)
    if wish := choose_verifier(name, "none" if verifier is None else render_on_one_line(verifier)):
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
        answer_tokens=_count_longest(tokenizer, [line.answer for line in lines]),
        completion_tokens=_count_longest(tokenizer, [_join_text(line.completion) for line in lines]),
    )


def _drop_needless_chat(sources: Sources, tokenizer: Any) -> Sources:
    """Return the sources with `chat` off if it was guessed and the chat template puts no words around a text: a model with such a
    template was never trained to chat. Else return them as they are."""
    from jinja2 import TemplateError

    if sources.settled or not sources.training.chat:
        return sources
    try:
        rendered = render_prompt(tokenizer, [{"role": "user", "content": "?"}])
    except (TemplateError, ValueError, TypeError):
        return sources  # `load_prompts` meets the same error, and names the prompt in it
    if any(letter.isalpha() for letter in rendered):
        return sources
    exam = sources.exam and sources.exam.model_copy(update={"chat": False})
    return replace(sources, training=sources.training.model_copy(update={"chat": False}), exam=exam)


def _parse_verifier(text: str) -> Any:
    """Return the verifier that a user gave as a name or as YAML; None for none. Raises: ConfigError."""
    try:
        verifier = parse_yaml(text)
    except (ValueError, yaml.YAMLError):
        verifier = text
    if verifier in (None, "", "none"):
        return None
    # The section needs some share to be valid; only the verifier is checked here.
    validate_section(DomainEvalConfig, {"holdout": 0.5, "verifier": verifier}, "--verifier")
    return verifier


def _sample_prompts(table: PromptTable) -> list[PromptLine]:
    """Return about `MAX_SAMPLED_ROWS` rows, evenly over the table, or all if there are fewer."""
    return table.rows[:: max(1, len(table) // MAX_SAMPLED_ROWS)]


def _count_longest(tokenizer: Any, texts: Sequence[str]) -> int:
    """Return the number of tokens of the longest text; 0 if all are empty."""
    filled = [text for text in texts if text]
    if not filled:
        return 0
    return max(len(ids) for ids in tokenizer(filled, add_special_tokens=False)["input_ids"])


def propose_verifier(lines: Sequence[PromptLine]) -> tuple[Any, str]:
    """Return a verifier as a pipeline spells it, and the reason for it; None if no verifier can judge such answers."""
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
    if any("\n" in answer or len(answer) > MAX_EXACT_CHARACTERS for answer in answers):
        return None, "the answers are free text, which nothing here can judge"
    if any(_shows_working(line) for line in lines):
        return "last_line", "the last line of the response is the answer"
    return "exact_match", "the whole response is the answer; `last_line` if the experts show their working first"


def _is_number(answer: str) -> bool:
    """Return True for a number, with a sign of money or percent or without, and for shown working that ends with one."""
    return bool(NUMBER.fullmatch(answer.rpartition(WORKING_MARK)[2].strip().strip("$€£%")))


def _choice_verifier(last: str) -> Any:
    """Return the verifier for answers from A to the letter `last`."""
    if last <= "D":  # the verifier's default is ABCD
        return "multiple_choice"
    return {"kind": "multiple_choice", "choices": "".join(chr(c) for c in range(ord("A"), ord(last) + 1))}


def _shows_working(line: PromptLine) -> bool:
    """Return True if the completion has several lines, the last of which is the answer."""
    lines = _join_text(line.completion).strip().splitlines()
    return len(lines) > 1 and lines[-1].strip() == line.answer.strip()


def _join_text(completion: str | Messages | None) -> str:
    """Return the text of a completion; empty if there is none."""
    if isinstance(completion, str | None):
        return completion or ""
    return "".join(message["content"] for message in completion)


def choose_share(domains: Mapping[str, DomainFacts]) -> float:
    """Return the share of prompts to hold out: one for all domains, so that a prompt of two files is on the same side in both.

    It is the smallest share, from 2 % up, that gives the exam of the smallest file `EXAM_QUESTIONS` questions, but at most the first
    of `HOLDOUT_SHARES`. If that leaves a file without exam or training prompts, larger shares are tried, the last one whatever comes.
    """
    tables = [facts.table for facts in domains.values() if wants_holdout(facts)]
    fewest = min((len(table) for table in tables), default=EXAM_QUESTIONS)
    smallest = round(min(HOLDOUT_SHARES[0], max(0.02, EXAM_QUESTIONS / fewest)), 2)
    for share in (smallest, *HOLDOUT_SHARES):
        if all(can_split(table, share) for table in tables):
            return share
    return HOLDOUT_SHARES[-1]


def wants_holdout(facts: DomainFacts) -> bool:
    """Return True if the domain's exam is held out of its training prompts."""
    return facts.verifier is not None and facts.sources.exam is None


def can_split(table: PromptTable, share: float) -> bool:
    """Return True if the share leaves prompts on both sides."""
    return 0 < int(table.held_out(share).sum()) < len(table)
