"""What the formats of tool calls share: what is read of a turn, the error for what cannot be read, and JSON."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from opd.environments.records import Tool, ToolCall
from opd.text import readable

OPEN, CLOSE = "<tool_call>", "</tool_call>"
BEGINS = re.compile(re.escape(OPEN))
_BETWEEN = re.compile(re.escape(OPEN) + r"(.*?)" + re.escape(CLOSE), re.DOTALL)


class BadCall(Exception):
    """A call that cannot be made as it is written; the policy reads why, so words of its own in it have to be text."""

    def __init__(self, why: str) -> None:
        super().__init__(readable(why))


@dataclass(frozen=True, slots=True)
class Written:
    """A turn as a format reads it."""

    calls: tuple[ToolCall, ...]
    """The calls in it, in order, whatever they ask for."""
    text: str
    """What stands around them; all of the turn if it has none."""


class ToolFormat(Protocol):
    """How models of one family write tool calls."""

    marks: tuple[str, ...]
    """Texts that tell calls from other text. For some students they are special tokens, which a turn's text has to keep."""
    told: str
    """How a call is written, for a student whose chat template does not say it."""
    begins: re.Pattern[str]
    """Finds where a call begins."""
    ends: str
    """What ends it; empty: the end of the turn."""

    def read(self, text: str, tools: Sequence[Tool]) -> Written:
        """The calls of a turn. `tools` decide the types of arguments that are written without quotes.

        Raises: BadCall for a call that was begun and cannot be read.
        """
        ...

    def write(self, calls: Sequence[ToolCall]) -> str:
        """The calls as such a model writes them."""
        ...


def between_tags(text: str) -> tuple[list[str], str]:
    """What stands between `<tool_call>` and `</tool_call>`, and what stands around them. Raises: BadCall for half a pair."""
    found: list[str] = _BETWEEN.findall(text)
    if text.count(OPEN) != len(found) or text.count(CLOSE) != len(found):
        raise BadCall(f"every {OPEN} needs its {CLOSE}")
    return found, _BETWEEN.sub("", text) if found else text


def in_tags(insides: Sequence[str]) -> str:
    """Inverse of `between_tags`, one call after the other."""
    return "\n".join(f"{OPEN}\n{inside}\n{CLOSE}" for inside in insides)


def parsed(text: str, where: str) -> Any:
    """The JSON of a text. Raises: BadCall that says where it stands."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise BadCall(f"not JSON {where}: {error}") from None


def call_of(data: Any, where: str) -> ToolCall:
    """A call as a JSON object with `name` and `arguments`. Raises: BadCall if it is none."""
    if not isinstance(data, dict) or not isinstance(data.get("name"), str):
        raise BadCall(f'wanted {{"name": ..., "arguments": {{...}}}} {where}')
    return ToolCall(name=data["name"], arguments=arguments_of(data["name"], data.get("arguments", {})))


def arguments_of(name: str, arguments: Any) -> Mapping[str, Any]:
    """The arguments of a call of `name`. Raises: BadCall if they are no object."""
    if not isinstance(arguments, dict):
        raise BadCall(f"{name:.60}: arguments is {arguments!r:.60}, wanted object")
    return arguments
