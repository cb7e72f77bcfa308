"""Checks tool calls against the tools of an environment, and reads the calls of a model without a chat template."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from opd.records.environments import Tool, ToolCall
from opd.records.json_fields import parse_strict_json
from opd.tool_formats.records import BadCall
from opd.tool_formats.schema import problem_with, schema_properties


def check_calls(calls: Sequence[ToolCall], tools: Sequence[Tool]) -> tuple[ToolCall, ...]:
    """Return the calls unchanged. Raises: BadCall for a call that names no tool, or does not fit the tool's schema."""
    return tuple(_check_call(call.name, call.arguments, tools) for call in calls)


def explain_bad_tools(tools: Any) -> str:
    """Return why an environment cannot have these tools; empty if it can."""
    if not isinstance(tools, tuple | list) or not all(isinstance(tool, Tool) for tool in tools):
        return f"tools = {tools!r:.60}, which is no tuple of opd.records.environments.Tool"
    for tool in tools:
        try:
            json.dumps(tool.schema(), allow_nan=False)
        except (TypeError, ValueError, RecursionError) as error:
            return f"the tool {tool.name!r:.60} cannot be written as JSON, as the policy reads it: {error}"
    return ""


def read_plain_calls(text: str, tools: Sequence[Tool]) -> tuple[ToolCall, ...]:
    """Return the call in a turn of a model without a chat template, which is a tool's name and its arguments; empty if there is none.

    The arguments are JSON (`add {"a": 1}`), or the text for the tool's only parameter (`calculate 3*4`). A turn that does not begin
    with a tool's name has no call. Raises: BadCall for arguments that do not fit the tool's schema.
    """
    name, _, arguments_text = text.strip().partition(" ")
    tool = next((tool for tool in tools if tool.name == name), None)
    if tool is None:
        return ()
    parameters = schema_properties(tool.parameters)
    arguments: Any
    try:
        arguments = parse_strict_json(arguments_text)
    except (ValueError, RecursionError):
        arguments = arguments_text.strip()
    if not isinstance(arguments, dict):
        if len(parameters) != 1:
            raise BadCall(f"{name} takes JSON with {', '.join(parameters) or 'nothing in it'}")
        # Text that is JSON may be a number, say; a parameter that is a string gets the text as it was written.
        ((parameter, schema),) = parameters.items()
        arguments = {parameter: arguments_text.strip() if schema.get("type") == "string" else arguments}
    return (_check_call(name, arguments, tools),)


def _check_call(name: str, arguments: Any, tools: Sequence[Tool]) -> ToolCall:
    tool = next((tool for tool in tools if tool.name == name), None)
    if tool is None:
        raise BadCall(f"no tool {name!r:.60}; there are {', '.join(tool.name for tool in tools)}")
    problem = problem_with(arguments, {"type": "object", **tool.parameters}, "arguments")
    if problem:
        raise BadCall(f"{name}: {problem}")
    return ToolCall(name=name, arguments=arguments)
