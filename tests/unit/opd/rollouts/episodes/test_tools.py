"""Tool calls: read where they fit the schema, refused with a reason that the policy can use where they do not."""

from __future__ import annotations

from typing import Any

import pytest

from opd.records.environments import Tool, ToolCall
from opd.rollouts.episodes.tools import read_plain_calls
from opd.tool_formats.records import BadCall
from opd.tool_formats.schema import problem_with
from tests.spoken import tagged_calls

ADD = Tool(
    name="add",
    description="Add two numbers.",
    parameters={"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}, "required": ["a", "b"]},
)  # fmt: skip
RUN = Tool(name="run", description="Run.", parameters={"type": "object", "properties": {"command": {"type": "string"}}})
STOP = Tool(name="stop", description="Stop.")
TOOLS = (ADD, RUN, STOP)


def tagged(inside: str) -> str:
    return f"<tool_call>{inside}</tool_call>"


def test_calls_between_tags_are_read_in_order() -> None:
    text = (
        "Well. " + tagged('\n{"name": "add", "arguments": {"b": 2, "a": 1}}\n') + " and " + tagged('{"name": "stop"}')
    )
    assert tagged_calls(text, TOOLS) == (
        ToolCall(name="add", arguments={"a": 1, "b": 2}),
        ToolCall(name="stop", arguments={}),
    )
    assert tagged_calls("no call at all", TOOLS) == ()


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("<tool_call>{", "needs its </tool_call>"),
        ("{}</tool_call>", "needs its </tool_call>"),
        (tagged("{'name': 'add'}"), "not JSON"),
        (tagged("[" * 100_000), "not JSON"),
        (tagged("[1]"), "wanted"),
        (tagged('{"name": 3}'), "wanted"),
        (tagged('{"name": "sub", "arguments": {}}'), "no tool 'sub'; there are add, run, stop"),
        (tagged('{"name": "add", "arguments": {"a": 1}}'), "add: arguments lacks b"),
        (tagged('{"name": "add", "arguments": {"a": 1, "b": "2"}}'), "arguments.b is '2', wanted integer"),
        (tagged('{"name": "add", "arguments": {"a": 1, "b": true}}'), "arguments.b is True"),
        (tagged('{"name": "add", "arguments": {"a": 1, "b": 2, "c": 3}}'), "has 'c', which is none of a, b"),
        (tagged('{"name": "add", "arguments": "1+2"}'), "wanted object"),
        (tagged('{"name": "stop", "arguments": {"now": 1}}'), None),
    ],
)
def test_a_call_that_does_not_fit_says_why(text: str, told: str | None) -> None:
    if told is None:
        assert tagged_calls(text, TOOLS)[0].arguments == {"now": 1}
        return
    with pytest.raises(BadCall) as caught:
        tagged_calls(text, TOOLS)
    assert told in str(caught.value)


def test_plain_calls_are_a_name_and_its_arguments() -> None:
    assert read_plain_calls(' add {"a": 1, "b": 2}\n', TOOLS) == (ToolCall(name="add", arguments={"a": 1, "b": 2}),)
    assert read_plain_calls("run ls -l", TOOLS) == (ToolCall(name="run", arguments={"command": "ls -l"}),)
    assert read_plain_calls("run 12", TOOLS) == (ToolCall(name="run", arguments={"command": "12"}),)
    assert read_plain_calls("running ls", TOOLS) == () == read_plain_calls("", TOOLS)
    with pytest.raises(BadCall, match="add takes JSON with a, b"):
        read_plain_calls("add 1 2", TOOLS)


@pytest.mark.parametrize(
    ("value", "schema", "wrong"),
    [
        (3, {"type": ["string", "null"]}, "wanted string or null"),
        (None, {"type": ["string", "null"]}, ""),
        ("x", {"enum": ["a", "b"]}, "wanted one of a, b"),
        ([1, "2"], {"type": "array", "items": {"type": "integer"}}, "it[1] is '2'"),
        ({"x": {"y": 1}}, {"properties": {"x": {"type": "object", "required": ["z"]}}}, "it.x lacks z"),
        ({"x": 1, "y": 2}, {"properties": {"x": {}}, "additionalProperties": True}, ""),
        ({"y": 2}, {"additionalProperties": False}, "which is none of no arguments"),
        (1.5, {"type": "number"}, ""),
        (1, {"type": "unheard of"}, "wanted unheard of"),
    ],
)
def test_schemas(value: Any, schema: dict[str, Any], wrong: str) -> None:
    found = problem_with(value, schema, "it")
    assert (wrong in found) if wrong else not found
