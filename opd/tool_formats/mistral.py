"""Mistral's convention: a special token, then the calls, to the end of the turn.

I add. [TOOL_CALLS]add[ARGS]{"a": 1, "b": 2}[TOOL_CALLS]add[ARGS]{"a": 3, "b": 4}      since tokenizer v11
I add. [TOOL_CALLS] [{"name": "add", "arguments": {"a": 1, "b": 2}}]                   before it
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence

from opd.records.environments import Tool, ToolCall
from opd.tool_formats.records import BadCall, WrittenCalls, check_arguments, parse_call, parse_json

MARK, ARGS, ID = "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"
WHERE = f"after {MARK}"
_NAMED = re.compile(r"([^\s\[{]++)\s*+(?:\[CALL_ID\][^\s\[{]*+)?(?:\[ARGS\])?\s*+(\{.*)", re.DOTALL)
"""Takes nothing back that it has matched: with two places for blanks, a long run of them would be tried in every division."""


class Mistral:
    """Both forms, told apart by what follows the token. Ids that the model writes are left out: calls are told apart by place."""

    marks: tuple[str, ...] = (MARK, ARGS, ID)
    begins, ends = re.compile(re.escape(MARK)), ""
    instructions = f"""To call them, end your answer with a list of calls:
{MARK}[{{"name": "NAME", "arguments": {{"ARGUMENT": "VALUE"}}}}]"""

    def read(self, text: str, tools: Sequence[Tool]) -> WrittenCalls:
        around, *parts = text.split(MARK)
        return WrittenCalls(tuple(call for part in parts for call in _read_calls(part.strip())), around)

    def write(self, calls: Sequence[ToolCall]) -> str:
        return MARK + json.dumps([{"name": call.name, "arguments": dict(call.arguments)} for call in calls])


def _read_calls(part: str) -> list[ToolCall]:
    """Return the calls after one special token, one at least. Raises: BadCall."""
    if part[:1] in ("[", "{"):
        data = parse_json(part, WHERE)
        calls = [parse_call(entry, WHERE) for entry in (data if isinstance(data, list) else [data])]
        if calls:
            return calls
    named = _NAMED.fullmatch(part)
    if named is None:
        raise BadCall(f"wanted NAME{ARGS}{{...}}, or a list of calls, {WHERE}")
    name, arguments = named.groups()
    return [ToolCall(name=name, arguments=check_arguments(name, parse_json(arguments, f"{WHERE}{name:.60}{ARGS}")))]
