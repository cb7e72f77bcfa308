"""Encode prompts to the token ids that an engine reads.

A prompt of plain text comes after whatever the tokenizer puts in front of a text, such as a begin token. Chat messages go
through the model's chat template, which writes its own begin token.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import date, datetime, time
from pathlib import Path
from typing import Any

from opd.errors import ConfigError, ModelError, PromptError
from opd.interfaces import Tokenizer
from opd.prompts.chat_templates import apply_template
from opd.prompts.conversation import SYSTEM_ROLES, Messages
from opd.prompts.untrusted_text import escape_specials, escape_specials_inside, escape_variables, special_texts

ROLES = {"system", "developer", "user", "assistant", "tool", "function"}
"""Roles that chat templates know; a template may leave out their messages on purpose."""
_LETTER = "a"
"""Any text with which `ids_in_front` tries what a tokenizer adds."""


def load_tokenizer(model_dir: Path, add_special_tokens: bool = True) -> Any:
    """Load the tokenizer of a model directory. No code from the directory is run, and no hub is asked.

    Without `add_special_tokens` it is passed to `put_nothing_in_front`. Raises: ModelError for a directory without a
    tokenizer, and what `put_nothing_in_front` raises.
    """
    if not model_dir.is_dir():
        raise ModelError.at(
            model_dir,
            found="a file" if model_dir.is_file() else "no such directory",
            wanted="the directory of a model, with its tokenizer",
            fix="correct the path; if the model has moved, put it back, or a link to it: ln -s NEW OLD",
        )
    from transformers import AutoTokenizer

    try:
        # If a Mistral directory also has tekken.json, transformers would prefer it, with other ids and templates.
        tokenizer = AutoTokenizer.from_pretrained(
            model_dir, trust_remote_code=False, local_files_only=True, mistral_format=False
        )
    except (OSError, ValueError) as error:
        raise ModelError.at(
            model_dir,
            found=f"no tokenizer that can be read: {str(error).splitlines()[0]}",
            wanted="tokenizer.json, and the files beside it that the tokenizer was saved with",
            fix="copy them from the original model",
        ) from None
    if not add_special_tokens:
        put_nothing_in_front(tokenizer)
    return tokenizer


def put_nothing_in_front(tokenizer: Any) -> None:
    """Change a tokenizer so that it adds nothing to a text, whatever its files say.

    Do not save it afterwards, since the saved files would have the change. Raises: ConfigError for a tokenizer written in
    Python that adds something.
    """
    if hasattr(tokenizer, "backend_tokenizer"):
        tokenizer.backend_tokenizer.post_processor = None
    if ids_in_front(tokenizer):
        raise ConfigError.at(
            "add_special_tokens",
            found=f"false, and a {type(tokenizer).__name__}, which cannot be told so",
            wanted="a tokenizer of the library `tokenizers`",
            fix="leave the key out: then prompts begin as the tokenizer has it",
        )


def ids_in_front(tokenizer: Tokenizer) -> list[int]:
    """Return the ids that the tokenizer puts in front of a text, such as a begin token.

    Ids that it puts behind the text are left out, because the model goes on writing there. Raises: ValueError if the ids of
    the text itself change when special tokens are added.
    """
    plain, full = (_encode_texts(tokenizer, [_LETTER], add_special_tokens=add)[0] for add in (False, True))
    for start in range(len(full) - len(plain) + 1):
        if full[start : start + len(plain)] == plain:
            return full[:start]
    raise ValueError(f"a tokenizer that reads {_LETTER!r} as {plain} alone and as {full} with its special tokens")


def encode_prompt(
    tokenizer: Tokenizer, prompt: str | Messages, day: date | None = None, **variables: Any
) -> tuple[int, ...]:
    """Return the token ids of a prompt. `day`: date for a chat template that asks for one; None: today. `variables`: further
    variables of the template."""
    (ids,) = _encode_texts(tokenizer, [render_prompt(tokenizer, prompt, day, **variables)])
    return tuple(_with_begin_tokens(ids, ids_in_front(tokenizer)) if isinstance(prompt, str) else ids)


def render_prompt(tokenizer: Tokenizer, prompt: str | Messages, day: date | None = None, **variables: Any) -> str:
    """Return the text of a prompt that is then tokenised, without what the tokenizer puts in front of plain text.

    It ends where the model begins to write, unless `variables`, those of the chat template, say otherwise. A prompt of plain
    text stays as it is, with any special tokens in it. In messages special tokens are broken up, so that a message cannot
    contain the end of its turn. Raises: jinja2's TemplateError, ValueError or TypeError if the template refuses the messages.
    """
    if isinstance(prompt, str):
        return prompt
    specials = special_texts(tokenizer)
    messages = [escape_specials_inside(message, specials) for message in prompt]
    return render_messages(tokenizer, messages, day, **escape_variables(variables, specials))


def render_messages(tokenizer: Tokenizer, prompt: Messages, day: date | None = None, **variables: Any) -> str:
    """Return the chat template's text for messages, which are passed unchanged. Raises: as `render_prompt`."""
    # transformers gives templates a function `strftime_now`; a variable of the same name takes precedence.
    clock = {} if day is None else {"strftime_now": datetime.combine(day, time()).strftime}
    variables = {"add_generation_prompt": True, **clock, **variables}
    return apply_template(tokenizer, prompt, **variables)


def encode_text(tokenizer: Tokenizer, text: str) -> list[int]:
    """Return the ids of a text, with special tokens for those spelt out in it. None are added, so use it for text that
    continues another one, or that a chat template wrote."""
    return list(_encode_texts(tokenizer, [text])[0])


def encode_prompts(
    tokenizer: Tokenizer,
    prompts: Sequence[str | Messages],
    day: date | None = None,
    variables: Sequence[Mapping[str, Any]] = (),
    required: Sequence[Sequence[str]] = (),
) -> list[Sequence[int]]:
    """Return the token ids of many prompts at once. A prompt of white space only, or of special tokens only, gets no ids.

    `variables`: further variables of the chat template for each prompt. `required`: for each prompt the contents of messages
    that the template must not leave out. Raises: what `render_prompt` raises, and ValueError if the chat template leaves the
    question out, because then all prompts would be equal, or what is required.
    """
    row_variables, row_required = variables or [{}] * len(prompts), required or [()] * len(prompts)
    texts = {
        index: _render_question(tokenizer, prompt, day, row_variables[index], row_required[index])
        for index, prompt in enumerate(prompts)
        if not is_blank(prompt)
    }
    special, front = set(tokenizer.all_special_ids), ids_in_front(tokenizer)
    token_ids: list[Sequence[int]] = [()] * len(prompts)
    for index, ids in zip(texts, _encode_texts(tokenizer, list(texts.values())), strict=True):
        if any(token not in special for token in ids):
            token_ids[index] = _with_begin_tokens(ids, front) if isinstance(prompts[index], str) else ids
    return token_ids


def make_row_error(row_label: str, model: str, error: Exception) -> PromptError:
    """Return the error about a row that cannot be encoded.

    `error` is the reason: there is no chat template, it refuses the messages, or a text is not Unicode. `model`: the one
    that would read the row, `student` or `base`.
    """
    return PromptError.at(
        row_label,
        found=str(error),
        wanted=f"text or messages that the {model}'s tokenizer and chat template take",
        fix=f"correct or delete this row, give text instead of messages, or choose a {model} with a chat template",
    )


def _with_begin_tokens(ids: list[int], front: list[int]) -> list[int]:
    """Return the ids of a text with the begin tokens in front, unless the text spells them out itself."""
    return ids if ids[: len(front)] == front else front + ids


def _encode_texts(tokenizer: Tokenizer, texts: list[str], *, add_special_tokens: bool = False) -> list[list[int]]:
    if not texts:
        return []
    token_ids: list[list[int]] = tokenizer(
        texts, add_special_tokens=add_special_tokens, return_attention_mask=False, return_token_type_ids=False
    )["input_ids"]
    return token_ids


def mark_prompt(prompt: str | Messages, text: str) -> str | Messages:
    """Return the prompt with a text at its beginning: that of the system message, on lines of its own, or of the plain text, just as
    it is. A prompt without text stays as it is."""
    if not text or is_blank(prompt):
        return prompt
    if isinstance(prompt, str):
        return text + prompt
    first = prompt[0]
    if first["role"] not in SYSTEM_ROLES or not first["content"].strip():
        return [{"role": "system", "content": text}, *prompt[first["role"] in SYSTEM_ROLES :]]
    return [{**first, "content": f"{text}\n\n{first['content']}"}, *prompt[1:]]


def is_blank(prompt: str | Messages) -> bool:
    """Return True for a prompt without text, which is left out of a merge."""
    texts = [prompt] if isinstance(prompt, str) else [message["content"] for message in prompt]
    return not "".join(texts).strip()


def _render_question(
    tokenizer: Tokenizer,
    prompt: str | Messages,
    day: date | None,
    variables: Mapping[str, Any],
    required: Sequence[str] = (),
) -> str:
    """Return `render_prompt`. Raises: also ValueError if the chat template leaves out every message, one of a role that is not in
    `ROLES`, or one of the contents in `required`."""
    text = render_prompt(tokenizer, prompt, day, **variables)
    if isinstance(prompt, str):
        return text
    specials = special_texts(tokenizer)
    lost = [m["role"] for m in prompt if escape_specials(m["content"], specials).strip() not in text]
    if len(lost) == len(prompt) or not set(lost) <= ROLES:
        role = next((role for role in lost if role not in ROLES), lost[0])
        raise ValueError(f"a chat template that leaves out what has the role {role!r}; most know user and assistant")
    for content in required:
        if escape_specials(content, specials).strip() not in text:
            raise ValueError(f"a chat template that leaves out, or changes, the message {content!r:.60}")
    return text
