"""Thoughts: what a model writes between tags before it says something. Nobody acts on them, and nobody else reads them.

<think>I could add, or ask.</think>                   a thought
Let me add. <tool_call>...</tool_call>                what is said
"""

from __future__ import annotations

import re
from collections.abc import Iterator

TAGS: tuple[tuple[str, str], ...] = (
    ("<think>", "</think>"),
    ("[THINK]", "[/THINK]"),
    ("<seed:think>", "</seed:think>"),
)
"""Begin and end of a thought, of the families that have tags: DeepSeek, Qwen and many others; Mistral; Seed."""
_ENDS = dict(TAGS)
_TAG = re.compile("|".join(re.escape(tag) for pair in TAGS for tag in pair))


def has_thoughts(text: str) -> bool:
    """Return True if a text has a tag of a thought."""
    return _TAG.search(text) is not None


def without_thoughts(text: str, call: re.Pattern[str] | None = None, end: str = "") -> str:
    """Return what is said, without the white space that parted it from the thoughts; `call` and `end` as for `split_thoughts`."""
    if not has_thoughts(text):
        return text
    return "".join(part for part, thought in split_thoughts(text, call, end) if not thought).strip()


def split_thoughts(text: str, call: re.Pattern[str] | None = None, end: str = "") -> Iterator[tuple[str, bool]]:
    """Return the parts of a turn in order, each with True if it is a thought.

    A thought lasts to its end tag, or to the end of a turn that was cut in it; an end tag without a begin tag ends one that the
    prompt began. Tags within a call are text: `call` finds where one begins, `end` is the text that ends it, nothing: the turn's end.
    """
    parts: list[tuple[str, bool]] = []
    begun = at = 0
    begun_call = call.search(text) if call is not None else None
    to_the_end = False
    while (tag := _TAG.search(text, at)) is not None:
        if call is not None and begun_call is not None and begun_call.start() < at:
            begun_call = call.search(text, at)
        if begun_call is not None and begun_call.start() < tag.start() and end:
            at = _find_end(text, end, begun_call.end())
            continue
        to_the_end = to_the_end or (begun_call is not None and begun_call.start() < tag.start())
        if tag[0] not in _ENDS:
            parts = [(text[: tag.end()], True)]
            begun = at = tag.end()
            to_the_end = False
            continue
        at = _find_end(text, _ENDS[tag[0]], tag.end())
        if not to_the_end:
            parts += [(text[begun : tag.start()], False), (text[tag.start() : at], True)]
            begun = at
    parts.append((text[begun:], False))
    return (part for part in parts if part[0])


def _find_end(text: str, end: str, start: int) -> int:
    """Return the place where the text goes on after `end`, the length of the text if that does not stand in it."""
    index = text.find(end, start)
    return len(text) if index == -1 else index + len(end)
