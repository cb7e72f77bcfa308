"""Calls in text that is no clean turn: whatever is written and however it breaks off, what it asks for is found."""

from __future__ import annotations

import random
import time

import pytest

from opd.records.environments import ToolCall
from opd.tool_formats import TOOL_FORMATS, tool_format
from opd.tool_formats.call_fragments import find_begun_calls

RUN = ToolCall(name="run", arguments={"command": 'cat "/tests/a b"\n'})


@pytest.mark.parametrize("name", TOOL_FORMATS)
def test_every_format_is_found_whole_and_with_any_end_missing(name: str) -> None:
    text = tool_format(name).write([RUN])
    assert find_begun_calls(text) == (RUN,)
    assert find_begun_calls(f"Well, {text} and {{so}} [on]") == (RUN,)
    begin = text.index("/tests/a")
    for end in range(begin + 8, len(text)):
        (found,) = find_begun_calls(text[:end])
        assert found.name == "run" and "/tests/a" in found.arguments["command"]


@pytest.mark.parametrize("name", TOOL_FORMATS)
def test_a_call_beside_broken_ones_is_found(name: str) -> None:
    """Parts of calls of every format around a whole one."""
    pieces = ["<tool_call>", "</tool_call>", '{"name": "x", ', '{"a": [1, 2}', "<function=y>", "\n", " text ", "}", "]"]
    rng, text = random.Random(name), tool_format(name).write([RUN])
    for _ in range(300):
        before, after = ("".join(rng.choices(pieces, k=rng.randint(0, 3))) for _ in range(2))
        found = find_begun_calls(f"{before}\n{text}{after}")
        assert any("/tests/a" in str(call.arguments.get("command")) for call in found), (before, after)


@pytest.mark.parametrize(
    "text",
    [
        '{"type": "function", "function": {"name": "run", "arguments": "{\\"command\\": \\"ls\\"}"}}',
        '{"arguments": {"command": "ls"}, "name": "run"}',
        "{'name': 'run', 'arguments': {'command': 'ls'}}",
        '{"name": "run", "arguments": {"command": "ls",}}',
        '{"name": "run", "parameters": {"command": "ls"',
    ],
)
def test_other_ways_to_write_a_call(text: str) -> None:
    assert find_begun_calls(text)[0] == ToolCall(name="run", arguments={"command": "ls"})


@pytest.mark.parametrize(
    "text", ["", "Done.", 'The answer is {"x": 3}.', "a[0] = f(1, 2)", "<think>a, b (c)</think>", "{}"]
)
def test_other_text_has_none(text: str) -> None:
    assert find_begun_calls(text) == ()


def test_text_that_loops_is_gone_through_soon() -> None:
    for piece in ('{"name":', '{"name": "', '{"name": "a", "arguments": {"command": "', "<tool_call>", "<function=a>", "[a(b='", ",a (", "a", "[TOOL_CALLS]a{", "\\", '{"input"', " "):  # fmt: skip
        begun = time.process_time()
        find_begun_calls(piece * 8192)
        assert time.process_time() - begun < 20, piece
