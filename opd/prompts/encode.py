"""From a prompt to the token ids that the engine reads: text as it is, chat messages through the model's own template."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import date, datetime, time
from typing import Any

from opd.errors import PromptError
from opd.interfaces import Tokenizer
from opd.prompts.conversation import Messages

ROLES = {"system", "developer", "user", "assistant", "tool", "function"}
"""Roles whose messages a chat template may leave out on purpose."""


def encode_prompt(
    tokenizer: Tokenizer, prompt: str | Messages, day: date | None = None, **variables: Any
) -> tuple[int, ...]:
    """Token ids of a prompt. `day` is the date for a chat template that asks for one; None: today. `variables` are the template's."""
    (ids,) = _encode(tokenizer, [render_prompt(tokenizer, prompt, day, **variables)])
    return tuple(ids)


def render_prompt(tokenizer: Tokenizer, prompt: str | Messages, day: date | None = None, **variables: Any) -> str:
    """The text that is tokenised; `variables` are the chat template's.

    Raises: jinja2's TemplateError, ValueError or TypeError if the template refuses it.
    """
    if isinstance(prompt, str):
        return prompt
    # transformers gives templates a function of this name; a variable of the same name takes precedence.
    clock = {} if day is None else {"strftime_now": datetime.combine(day, time()).strftime}
    text: str = tokenizer.apply_chat_template(prompt, add_generation_prompt=True, tokenize=False, **clock, **variables)
    return text


def encode_text(tokenizer: Tokenizer, text: str) -> list[int]:
    """Token ids of a text as it is, special tokens in it included."""
    return list(_encode(tokenizer, [text])[0])


def encode_prompts(
    tokenizer: Tokenizer,
    prompts: Sequence[str | Messages],
    day: date | None = None,
    variables: Sequence[Mapping[str, Any]] = (),
) -> list[Sequence[int]]:
    """Token ids of many prompts at once. A prompt without a visible sign, or of special tokens only, gets no ids. `variables`: what
    the chat template is given beside the messages of each prompt.

    Raises: what `render_prompt` raises, and ValueError if the chat template leaves the question out, because then all
    prompts would be the same.
    """
    given = variables or [{}] * len(prompts)
    asking = {index: _question(tokenizer, p, day, given[index]) for index, p in enumerate(prompts) if not _is_blank(p)}
    special = set(tokenizer.all_special_ids)
    found: list[Sequence[int]] = [()] * len(prompts)
    for index, ids in zip(asking, _encode(tokenizer, list(asking.values())), strict=True):
        if any(token not in special for token in ids):
            found[index] = ids
    return found


def refused_row(where: str, whose: str, error: Exception) -> PromptError:
    """The refusal of a row that cannot be encoded. `error` says why: no chat template, one that refuses the messages, or text that
    is not Unicode. `whose` is the model that would read it: student or base."""
    return PromptError.at(
        where,
        found=str(error),
        wanted=f"text or messages that the {whose}'s tokenizer and chat template take",
        fix=f"correct or delete this row, give text instead of messages, or choose a {whose} with a chat template",
    )


def _encode(tokenizer: Tokenizer, texts: list[str]) -> list[list[int]]:
    if not texts:
        return []
    found: list[list[int]] = tokenizer(
        texts, add_special_tokens=False, return_attention_mask=False, return_token_type_ids=False
    )["input_ids"]
    return found


def _is_blank(prompt: str | Messages) -> bool:
    texts = [prompt] if isinstance(prompt, str) else [message["content"] for message in prompt]
    return not "".join(texts).strip()


def _question(tokenizer: Tokenizer, prompt: str | Messages, day: date | None, variables: Mapping[str, Any]) -> str:
    text = render_prompt(tokenizer, prompt, day, **variables)
    if not isinstance(prompt, str):
        lost = [message["role"] for message in prompt if message["content"].strip() not in text]
        if len(lost) == len(prompt) or not set(lost) <= ROLES:
            odd = next((role for role in lost if role not in ROLES), lost[0])
            raise ValueError(f"a chat template that leaves out what has the role {odd!r}; most know user and assistant")
    return text
