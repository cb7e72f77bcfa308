"""The convention of Llama 3.1 to 3.3, and of Llama 4 where it writes JSON: bare objects, the first perhaps after a special token.

<|python_tag|>{"name": "add", "parameters": {"a": 1, "b": 2}}; {"name": "add", "parameters": {"a": 3, "b": 4}}
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from typing import Any

from opd.records.environments import Tool, ToolCall
from opd.records.json_fields import STRICT
from opd.tool_formats.records import BadCall, Uncounted, WrittenCalls, check_arguments

TAG = "<|python_tag|>"
_BEGUN = re.compile(r'\{\s*("name"|"parameters"|"arguments"|"type"\s*:\s*"function")')
"""Begins a call, and hardly any other text."""
_OBJECT = re.compile(r'\{\s*"')
"""Begins an object that is not empty."""


class Llama3Json:
    """Objects with a name and parameters anywhere in the turn; other JSON is text. Llama writes `arguments` at times."""

    marks: tuple[str, ...] = (TAG,)
    begins, ends = _BEGUN, ""
    instructions = """To call one, answer with a JSON object of its name and its arguments; you may write several, with "; " in between:
{"name": "NAME", "parameters": {"ARGUMENT": "VALUE"}}"""

    def read(self, text: str, tools: Sequence[Tool]) -> WrittenCalls:
        calls: list[ToolCall] = []
        around: list[str] = []
        end = 0
        for begin, after, call in _find_objects(text):
            between = text[end:begin].replace(TAG, "")
            around.append(between if not calls or between.strip() not in ("", ";") else "")
            calls.append(call)
            end = after
        if not calls and TAG in text:
            raise BadCall(f'wanted {{"name": ..., "parameters": {{...}}}} after {TAG}')
        tail = text[end:]
        around.append(tail if not calls or tail.strip() not in ("", ";") else "")
        return WrittenCalls(tuple(calls), "".join(around))

    def write(self, calls: Sequence[ToolCall]) -> str:
        return "; ".join(json.dumps({"name": call.name, "parameters": dict(call.arguments)}) for call in calls)


def _find_objects(text: str) -> Iterator[tuple[int, int, ToolCall]]:
    """Yield begin, end and content of each call. Raises: BadCall for one that was begun and is no JSON, or has no parameters."""
    uncounted, end = Uncounted(text), 0
    while (match := _OBJECT.search(text, end)) is not None:
        begin = match.start()
        try:
            data, end = STRICT.raw_decode(uncounted, begin)
        except json.JSONDecodeError as error:
            if _BEGUN.match(text, begin):
                located_error = json.JSONDecodeError(error.msg, text, error.pos)
                raise BadCall(f"a call that is no JSON: {located_error}") from None
            end = max(begin + 1, error.pos)
        except (ValueError, RecursionError) as error:
            raise BadCall(f"a call that is no JSON: {error}") from None
        else:
            call = _read_call(data)
            if call is not None:
                yield begin, end, call


def _read_call(data: dict[str, Any]) -> ToolCall | None:
    """Return the call that an object is; None for other JSON. Raises: BadCall for parameters that are no object."""
    key = next((key for key in ("parameters", "arguments") if key in data), None)
    if key is None or not isinstance(data.get("name"), str):
        return None
    return ToolCall(name=data["name"], arguments=check_arguments(data["name"], data[key]))
