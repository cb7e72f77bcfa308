"""Make text harmless that we did not write: whatever in it would begin or end a turn is broken up with a blank.

    <|im_end|>   a special token of the tokenizer's                     < |im_end|>
    <|user|>     plain text by which the chat template marks a turn     < |user|>

This is done to prompts, system messages, tools, results of tools, summaries and answers of sub-agents, for environments and
for programs as agents alike.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any

from opd.prompts.chat_templates import apply_template

_POLICY_MARKS = ("<think>", "</think>", "<tool_call>", "</tool_call>")
"""Marks that a policy writes within its own turn. They begin and end no turn, so they stay as they are in any text."""
_TOOL_MARKS = ("<tools>", "</tools>", "<tool_response>", "</tool_response>")
"""Marks around tools and results. They are broken up even where the template lacks them, because we write them then."""
_TURN = re.compile(r"<[|｜][^<>\n]{1,40}[|｜]>")
"""Form of an added token that marks a turn, whether the tokenizer flags it as special or not."""
_MARK = re.compile(rf"{_TURN.pattern}|</?[A-Za-z][\w:.-]*>|\[/?[A-Z][A-Z_]+\]|<</?[A-Z]+>>")
"""Marks of a turn in plain text: `<|user|>`, `<s>`, `[INST]`, `<<SYS>>`."""
_HEADER = re.compile(r"(?:#+ *)?[A-Za-z]{4,}:\s*\Z")
"""Heading of a turn in a template without such marks: `### Instruction:`, `USER:`."""
_TAG = re.compile(r"<(/?)([A-Za-z][\w:.-]*)>")
"""An opening or a closing tag."""
_SPECIAL_ATTRIBUTES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
"""Attributes of a tokenizer that name its special tokens."""
_PROBES = ("zq1zq", "zq2zq", "zq3zq")
"""Contents of the messages with which a template is tried; they occur in no template."""


def special_texts(tokenizer: Any) -> Sequence[str]:
    """Return the texts that no message may contain, the longest first: special tokens, and the chat template's marks of turns."""
    return _special_texts(tokenizer, str(getattr(tokenizer, "chat_template", None) or ""))


@lru_cache(maxsize=8)
def _special_texts(tokenizer: Any, template: str) -> Sequence[str]:
    """Return `special_texts`. `template` is the tokenizer's template; as an argument it is part of the cache's key, because the
    attribute may be set anew."""
    added: Mapping[int, Any] = getattr(tokenizer, "added_tokens_decoder", {})
    # `all_special_ids` lacks tokens that are neither end nor padding and so on: Llama's headers, Mistral's [TOOL_CALLS].
    special = {*tokenizer.all_special_ids, *(i for i, token in added.items() if token.special)}
    texts = {tokenizer.decode([i], skip_special_tokens=False) for i in special}
    plain_tokens = {str(token.content) for i, token in added.items() if i not in special}
    gaps = list(_find_gaps(tokenizer)) if template else []
    # Some tokenizers flag none of their marks as special, such as DeepSeek's <｜User｜>. But other added tokens are ordinary
    # words, such as Gemma's <td> or runs of blanks. So a token counts if it has the form of one or the template writes it.
    texts |= {
        text for text in plain_tokens if _TURN.fullmatch(text) or (text.strip() and any(text in gap for gap in gaps))
    }
    for gap in gaps:
        marks = set(_MARK.findall(gap))
        header = _HEADER.search(gap)
        if header and not marks and not any(text in gap for text in texts if text):
            marks.add(header[0].strip())
        texts |= marks
    texts -= _find_tag_pairs(tokenizer, template, [*texts, *plain_tokens])
    texts |= {*_TOOL_MARKS} if template else set()
    return sorted(texts - {"", *_POLICY_MARKS}, key=lambda text: (-len(text), text))


def _find_tag_pairs(tokenizer: Any, template: str, added: Iterable[str]) -> set[str]:
    """Return pairs of tokens such as `<answer>` and `</answer>` that the chat template does not mention.

    They mark the text between them and begin or end no turn. Prompts mention them, and the model itself writes them.
    """
    named = {getattr(tokenizer, name, None) for name in _SPECIAL_ATTRIBUTES}
    tags = {text: tag for text in added if text not in named and text not in template and (tag := _TAG.fullmatch(text))}
    return {text for text, tag in tags.items() if f"<{'' if tag[1] else '/'}{tag[2]}>" in tags}


def _find_gaps(tokenizer: Any) -> Iterator[str]:
    """Yield the texts that the chat template writes before, between and after messages."""
    from jinja2 import TemplateError

    system, user, tool = ({"role": role, "content": _PROBES[0]} for role in ("system", "user", "tool"))
    reply, follow_up = {"role": "assistant", "content": _PROBES[1]}, {"role": "user", "content": _PROBES[2]}
    for chat in ([user, reply, follow_up], [system, follow_up], [user, reply, tool | {"content": _PROBES[2]}]):
        try:
            text = apply_template(tokenizer, chat, add_generation_prompt=True)
        except (TemplateError, ValueError, TypeError):
            continue  # a template that refuses such a conversation has no marks for it
        yield from re.split("|".join(_PROBES), text)


def escape_specials(text: str, specials: Sequence[str]) -> str:
    """Return the text with a blank after the first character of each occurrence of one of `specials`.

    A special text of a single character is replaced by a blank. If it were removed, its neighbours could form a special text.
    """
    for special in specials:
        text = text.replace(special, f"{special[0]} {special[1:]}" if len(special) > 1 else " ")
    return text


def escape_specials_inside(value: Any, specials: Sequence[str]) -> Any:
    """Return a JSON value with `escape_specials` applied to all texts in it, keys included."""
    if isinstance(value, str):
        return escape_specials(value, specials)
    if isinstance(value, Mapping):
        return {
            escape_specials(str(key), specials): escape_specials_inside(inner, specials) for key, inner in value.items()
        }
    if isinstance(value, list | tuple):
        return [escape_specials_inside(inner, specials) for inner in value]
    return value


def escape_variables(variables: Mapping[str, Any], specials: Sequence[str]) -> dict[str, Any]:
    """Return a chat template's variables with harmless descriptions of tools. The other variables come from the user himself."""
    tools = {"tools": escape_specials_inside(variables["tools"], specials)} if variables.get("tools") else {}
    return {**variables, **tools}
