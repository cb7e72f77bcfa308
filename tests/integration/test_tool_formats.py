"""Whole calls are read as vLLM's parser of the same name reads them."""

from __future__ import annotations

import json
from typing import Any

import pytest

from opd.records.environments import Tool, ToolCall
from opd.tool_formats import ALIASES, TOOL_FORMATS, tool_format
from tests.chatml import chat_tokenizer
from tests.tool_templates import FAMILIES

TOOL = Tool(
    name="run",
    description="Run.",
    parameters={
        "type": "object",
        "properties": {
            "command": {"type": "string"},
            "a": {"type": "integer"},
            "loud": {"type": "boolean"},
            "share": {"type": "number"},
            "lines": {"type": "array"},
            "options": {"type": "object"},
            "most": {"anyOf": [{"type": "integer"}, {"type": "null"}]},
        },
    },
)
ADD = Tool(name="add", description="Add.", parameters={"type": "object", "properties": {"a": {"type": "integer"}}})
VALUES: tuple[dict[str, Any], ...] = (
    {"command": "ls -l"},
    {"command": 'say "a", then {b}; café [1](2)', "a": 3, "loud": True, "share": -1.5},
    {"lines": [1, "two", None, False], "options": {"a": {"b": [2.5]}}, "most": 7},
    {"command": "12", "most": None, "loud": False},
)
SPECIALS = ("<|python_tag|>", "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "<|python_start|>", "<|python_end|>")


def by_vllm(name: str, text: str, specials: tuple[str, ...] = SPECIALS) -> tuple[ToolCall, ...]:
    """The calls that vLLM reads in a turn."""
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest, ChatCompletionToolsParam
    from vllm.tool_parsers import ToolParserManager

    tools = [ChatCompletionToolsParam(**tool.schema()) for tool in (TOOL, ADD)]
    asked = ChatCompletionRequest(model="m", messages=[{"role": "user", "content": "x"}], tools=tools)
    parser = ToolParserManager.get_tool_parser(name)(chat_tokenizer(None, specials), tools)
    found = parser.extract_tool_calls(text, asked)
    return tuple(ToolCall(name=c.function.name, arguments=json.loads(c.function.arguments)) for c in found.tool_calls)


@pytest.mark.parametrize("name", [*TOOL_FORMATS, *ALIASES])
def test_what_we_write_is_the_same_for_vllm(name: str) -> None:
    form = tool_format(name)
    # Before its tokenizer had [ARGS], Mistral wrote the list that we write.
    specials = tuple(mark for mark in SPECIALS if name != "mistral" or mark != "[ARGS]")
    for values in VALUES:
        one = ToolCall(name="run", arguments=values)
        for calls in ((one,), (one, ToolCall(name="add", arguments={"a": 2}))):
            text = form.write(calls)
            assert by_vllm(name, text, specials) == form.read(text, (TOOL, ADD)).calls == calls, text


@pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES)
def test_what_models_write_is_the_same_for_vllm(family: Any) -> None:
    specials = family.specials or SPECIALS
    found = by_vllm(family.parser, family.turn, (*specials, "[TOOL_CALLS]"))
    assert found == tool_format(family.parser).read(family.turn, (ADD,)).calls
    assert len(found) == 2
