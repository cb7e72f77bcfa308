"""Parts that the formats of tool calls share: the record of a turn that was read, the error for what cannot be read, and JSON."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from opd.records.environments import Tool, ToolCall
from opd.records.json_fields import parse_strict_json
from opd.text import strip_control_characters

OPEN, CLOSE = "<tool_call>", "</tool_call>"
BEGINS = re.compile(re.escape(OPEN))


class BadCall(Exception):
    """A call that cannot be made as it is written; the policy reads why, so words of its own in it have to be text."""

    def __init__(self, reason: str) -> None:
        super().__init__(strip_control_characters(reason))


class Uncounted(str):
    """A text of which no lines are counted. Python's JSON counts those before each error, so that a text with an error at every
    brace would take the square of its length."""

    __slots__ = ()

    def count(self, *_: object) -> int:
        return 0

    def rfind(self, *_: object) -> int:
        return -1


@dataclass(frozen=True, slots=True)
class WrittenCalls:
    """A turn as a format reads it."""

    calls: tuple[ToolCall, ...]
    """The calls in it, in order, whatever they ask for."""
    text: str
    """Text around them; all of the turn if it has none."""
    ids: tuple[str, ...] = ()
    """Ids that the model gave the calls; none for most formats."""


class ToolFormat(Protocol):
    """The form in which models of one family write tool calls."""

    marks: tuple[str, ...]
    """Texts that tell calls from other text; special tokens for some students."""
    instructions: str
    """Instructions on writing a call, for a student whose chat template does not say it."""
    begins: re.Pattern[str]
    """Finds where a call begins."""
    ends: str
    """Text that ends it; empty: the end of the turn."""

    def read(self, text: str, tools: Sequence[Tool]) -> WrittenCalls:
        """Read the calls of a turn. `tools` decide the types of arguments that are written without quotes.

        Raises: BadCall for a call that was begun and cannot be read.
        """
        ...

    def write(self, calls: Sequence[ToolCall]) -> str:
        """Return the calls as such a model writes them."""
        ...


def between_tags(text: str) -> tuple[list[str], str]:
    """Return what stands between `<tool_call>` and `</tool_call>`, and what stands around them. Raises: BadCall for half a pair."""
    text_before, *parts = text.split(OPEN)
    pairs = [part.split(CLOSE) for part in parts]
    if CLOSE in text_before or any(len(pair) != 2 for pair in pairs):
        raise BadCall(f"every {OPEN} needs its {CLOSE}")
    return [inside for inside, _ in pairs], text_before + "".join(after for _, after in pairs)


def in_tags(insides: Sequence[str]) -> str:
    """Put calls between tags, one after the other: the inverse of `between_tags`."""
    return "\n".join(f"{OPEN}\n{inside}\n{CLOSE}" for inside in insides)


def parse_json(text: str, location: str) -> Any:
    """Parse the JSON of a text. Raises: BadCall that says where the error stands."""
    try:
        return parse_strict_json(text)
    except (ValueError, RecursionError) as error:
        raise BadCall(f"not JSON {location}: {error}") from None


def parse_call(data: Any, location: str) -> ToolCall:
    """Read a call from a JSON object with `name` and `arguments`. Raises: BadCall if it is none."""
    if not isinstance(data, dict) or not isinstance(data.get("name"), str):
        raise BadCall(f'wanted {{"name": ..., "arguments": {{...}}}} {location}')
    return ToolCall(name=data["name"], arguments=check_arguments(data["name"], data.get("arguments", {})))


def check_arguments(name: str, arguments: Any) -> Mapping[str, Any]:
    """Return the arguments of a call of `name`. Raises: BadCall if they are no object."""
    if not isinstance(arguments, dict):
        raise BadCall(f"{name:.60}: arguments is {arguments!r:.60}, wanted object")
    return arguments
