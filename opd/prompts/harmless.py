"""Other people's text stays text: whatever in it would begin or end a turn is broken up with a blank.

    <|im_end|>   a special token of the tokenizer's                     < |im_end|>
    <|user|>     plain text by which the chat template marks a turn     < |user|>

The same for prompts, system messages, tools, results, summaries and what sub-agents say, in the white box and in the black box.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any

from opd.prompts.chat_templates import apply_template

OWN = ("<think>", "</think>", "<tool_call>", "</tool_call>")
"""Marks that a policy writes within its turn: other texts may name it."""
FRAMES = ("<tools>", "</tools>", "<tool_response>", "</tool_response>")
"""Marks around tools and results: templates have it, and we write it where a template knows neither."""
_ROLE = re.compile(r"<[|｜][^<>\n]{1,40}[|｜]>")
"""An added token of this form is a mark of the model's, whether it is flagged as special or not."""
_MARK = re.compile(r"<[|｜][^<>\n]{1,40}[|｜]>|</?[A-Za-z][\w:.-]*>|\[/?[A-Z][A-Z_]+\]|<</?[A-Z]+>>")
"""Marks of a turn in plain text."""
_HEADER = re.compile(r"(?:#+ *)?[A-Za-z]{4,}:\s*\Z")
"""Headings of a turn where a template has no such marks: `### Instruction:`, `USER:`."""
_TAG = re.compile(r"<(/?)([A-Za-z][\w:.-]*)>")
"""Parts of a pair of tags."""
_NAMED = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
"""Roles of special tokens, as transformers names them."""
_SAID = ("zq1zq", "zq2zq", "zq3zq")
"""Texts of probes, which occur in no template."""


def special_texts(tokenizer: Any) -> Sequence[str]:
    """Return the texts that a message must not bring, the longest first: special tokens, and what the chat template writes around
    messages."""
    return _special_texts(tokenizer, str(getattr(tokenizer, "chat_template", None) or ""))


@lru_cache(maxsize=8)
def _special_texts(tokenizer: Any, template: str) -> Sequence[str]:
    """Return the same; `template` is the tokenizer's, which somebody may set anew."""
    added: Mapping[int, Any] = getattr(tokenizer, "added_tokens_decoder", {})
    # Those that have no role such as end or padding are not in `all_special_ids`: Llama's headers, Mistral's [TOOL_CALLS].
    special = {*tokenizer.all_special_ids, *(i for i, token in added.items() if token.special)}
    texts = {tokenizer.decode([i], skip_special_tokens=False) for i in special}
    plain_tokens = {str(token.content) for i, token in added.items() if i not in special}
    between = list(_find_gaps(tokenizer)) if template else []
    # Some flag none of their marks: DeepSeek's <｜User｜>. Other tokens that were added are words: Gemma's <td>, runs of blanks.
    texts |= {
        text for text in plain_tokens if _ROLE.fullmatch(text) or (text.strip() and any(text in gap for gap in between))
    }
    for gap in between:
        marks = set(_MARK.findall(gap))
        header = _HEADER.search(gap)
        if header and not marks and not any(text in gap for text in texts if text):
            marks.add(header[0].strip())
        texts |= marks
    texts -= _find_tag_pairs(tokenizer, template, [*texts, *plain_tokens])
    texts |= {*FRAMES} if template else set()
    return sorted(texts - {"", *OWN}, key=lambda text: (-len(text), text))


def _find_tag_pairs(tokenizer: Any, template: str, added: Iterable[str]) -> set[str]:
    """Return tokens such as `<answer>` and `</answer>`, of which the chat template knows nothing: what stands between them is
    marked, and no turn begins or ends. Prompts name them, and the model writes them itself."""
    named = {getattr(tokenizer, name, None) for name in _NAMED}
    tags = {text: tag for text in added if text not in named and text not in template and (tag := _TAG.fullmatch(text))}
    return {text for text, tag in tags.items() if f"<{'' if tag[1] else '/'}{tag[2]}>" in tags}


def _find_gaps(tokenizer: Any) -> Iterator[str]:
    """Yield what the chat template writes before, between and after messages."""
    from jinja2 import TemplateError

    system, user, tool = ({"role": role, "content": _SAID[0]} for role in ("system", "user", "tool"))
    reply, follow_up = {"role": "assistant", "content": _SAID[1]}, {"role": "user", "content": _SAID[2]}
    for chat in ([user, reply, follow_up], [system, follow_up], [user, reply, tool | {"content": _SAID[2]}]):
        try:
            text = apply_template(tokenizer, chat, add_generation_prompt=True)
        except (TemplateError, ValueError, TypeError):
            continue  # a template that takes no such conversation marks none
        yield from re.split("|".join(_SAID), text)


def escape_specials(text: str, specials: Sequence[str]) -> str:
    """Return the text with a blank inside of whatever would be read as one of the others; in place of one of a single character,
    which would leave what stands around it side by side."""
    for special in specials:
        text = text.replace(special, f"{special[0]} {special[1:]}" if len(special) > 1 else " ")
    return text


def escape_specials_inside(value: Any, specials: Sequence[str]) -> Any:
    """Return a JSON value with all of its texts harmless, keys too."""
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
    """Return a chat template's variables with what tools say of themselves harmless; the others do not come from outside."""
    tools = {"tools": escape_specials_inside(variables["tools"], specials)} if variables.get("tools") else {}
    return {**variables, **tools}
