"""Tool calls in a policy's text: how models write them, and whether they fit the tool's JSON schema."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from opd.environments.records import Tool, ToolCall
from opd.text import readable

OPEN, CLOSE = "<tool_call>", "</tool_call>"
_CALL = re.compile(re.escape(OPEN) + r"(.*?)" + re.escape(CLOSE), re.DOTALL)
_TYPES: dict[str, type | tuple[type, ...]] = {
    "string": str,
    "integer": int,
    "number": (int, float),
    "boolean": bool,
    "object": dict,
    "array": list,
    "null": type(None),
}


class BadCall(Exception):
    """A call that cannot be made as it is written; the policy reads why."""


def tagged_calls(text: str, tools: Sequence[Tool]) -> tuple[ToolCall, ...]:
    """The calls of a turn in Hermes' convention, which Qwen and many others share: JSON between `<tool_call>` tags.

    Example: 'Let me see. <tool_call>{"name": "add", "arguments": {"a": 1, "b": 2}}</tool_call>'
    Raises: BadCall for a call that is not closed, is no JSON, names no tool or does not fit the tool's schema.
    """
    return tuple(_checked(call.name, call.arguments, tools) for call in written_calls(text))


def without_calls(text: str) -> str:
    """The text that stands around the calls."""
    return _CALL.sub("", text)


def written_calls(text: str) -> tuple[ToolCall, ...]:
    """The calls of a turn, whatever they ask for. Raises: BadCall for one that is not closed, or is no JSON."""
    found = _CALL.findall(text)
    if text.count(OPEN) != len(found) or text.count(CLOSE) != len(found):
        raise BadCall(f"every {OPEN} needs its {CLOSE}")
    return tuple(_call(inside) for inside in found)


def _call(inside: str) -> ToolCall:
    try:
        data = json.loads(inside)
    except (ValueError, RecursionError) as error:
        raise BadCall(f"not JSON between the tags: {error}") from None
    if not isinstance(data, dict) or not isinstance(data.get("name"), str):
        raise BadCall('wanted {"name": ..., "arguments": {...}} between the tags')
    arguments = data.get("arguments", {})
    if not isinstance(arguments, dict):
        raise BadCall(f"{readable(data['name']):.60}: arguments is {arguments!r:.60}, wanted object")
    return ToolCall(name=data["name"], arguments=arguments)


def problem_with_tools(tools: Any) -> str:
    """Why these are no tools of an environment; empty if they are."""
    if not isinstance(tools, tuple | list) or not all(isinstance(tool, Tool) for tool in tools):
        return f"tools = {tools!r:.60}, which is no tuple of opd.environments.records.Tool"
    for tool in tools:
        try:
            json.dumps(tool.schema())
        except (TypeError, ValueError, RecursionError) as error:
            return f"the tool {tool.name!r:.60} cannot be written as JSON, as the policy reads it: {error}"
    return ""


def plain_calls(text: str, tools: Sequence[Tool]) -> tuple[ToolCall, ...]:
    """The call of a turn of a model without a chat template: a tool's name, then its arguments.

    The arguments are JSON (`add {"a": 1}`), or the text for the tool's only parameter (`calculate 3*4`). Text that begins
    with no tool's name has no call. Raises: BadCall for arguments that do not fit the tool's schema.
    """
    name, _, rest = text.strip().partition(" ")
    tool = next((tool for tool in tools if tool.name == name), None)
    if tool is None:
        return ()
    parameters = _properties(tool.parameters)
    arguments: Any
    try:
        arguments = json.loads(rest)
    except (ValueError, RecursionError):
        arguments = rest.strip()
    if not isinstance(arguments, dict):
        if len(parameters) != 1:
            raise BadCall(f"{name} takes JSON with {', '.join(parameters) or 'nothing in it'}")
        ((parameter, schema),) = parameters.items()
        arguments = {parameter: rest.strip() if schema.get("type") == "string" else arguments}
    return (_checked(name, arguments, tools),)


def _checked(name: str, arguments: Any, tools: Sequence[Tool]) -> ToolCall:
    tool = next((tool for tool in tools if tool.name == name), None)
    if tool is None:
        raise BadCall(f"no tool {name!r:.60}; there are {', '.join(tool.name for tool in tools)}")
    wrong = problem_with(arguments, {"type": "object", **tool.parameters}, "arguments")
    if wrong:
        raise BadCall(f"{name}: {wrong}")
    return ToolCall(name=name, arguments=arguments)


def problem_with(value: Any, schema: Mapping[str, Any], where: str) -> str:
    """Why a value does not fit a JSON schema, empty if it does. Knows `type`, `enum`, `properties`, `required`,
    `additionalProperties` (by default false beside `properties`) and `items`; other words of a schema, and these in a form that
    JSON schema does not know, are for the policy."""
    kind = schema.get("type")
    kinds = [kind] if isinstance(kind, str) else _texts(kind)
    if kinds and not any(_is(value, kind) for kind in kinds):
        return f"{where} is {value!r:.60}, wanted {' or '.join(kinds)}"
    choices = schema.get("enum")
    if isinstance(choices, list | tuple) and value not in choices:
        return f"{where} is {value!r:.60}, wanted one of {', '.join(map(str, choices))}"
    if isinstance(value, dict):
        return _problem_inside(value, schema, where)
    if isinstance(value, list) and isinstance(schema.get("items"), Mapping):
        problems = (problem_with(item, schema["items"], f"{where}[{i}]") for i, item in enumerate(value))
        return next((problem for problem in problems if problem), "")
    return ""


def _problem_inside(value: Mapping[str, Any], schema: Mapping[str, Any], where: str) -> str:
    known = _properties(schema)
    missing = [key for key in _texts(schema.get("required")) if key not in value]
    if missing:
        return f"{where} lacks {missing[0]}"
    strange = [key for key in value if key not in known]
    if strange and schema.get("additionalProperties", not known) is False:
        return f"{where} has {strange[0]!r:.60}, which is none of {', '.join(known) or 'no arguments'}"
    problems = (problem_with(value[key], known[key], f"{where}.{key}") for key in value if key in known)
    return next((problem for problem in problems if problem), "")


def _properties(schema: Mapping[str, Any]) -> Mapping[str, Mapping[str, Any]]:
    """Name -> schema of each property; a schema that is no object, such as `true`, takes anything."""
    found = schema.get("properties")
    if not isinstance(found, Mapping):
        return {}
    return {name: inner if isinstance(inner, Mapping) else {} for name, inner in found.items()}


def _texts(value: Any) -> list[str]:
    return [text for text in value if isinstance(text, str)] if isinstance(value, list | tuple) else []


def _is(value: Any, kind: str) -> bool:
    if isinstance(value, bool):  # Python's True is an int, JSON's is not
        return kind == "boolean"
    return kind in _TYPES and isinstance(value, _TYPES[kind])
