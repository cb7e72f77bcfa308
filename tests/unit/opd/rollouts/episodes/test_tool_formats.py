"""Each format of tool calls: what is read, what is refused and told, and that what is written is read back."""

from __future__ import annotations

import itertools
import random
import time
from contextlib import suppress
from typing import Any

import pytest

from opd.config.domains import StudentConfig
from opd.records.environments import Tool, ToolCall
from opd.rollouts.episodes.tools import read_plain_calls
from opd.tool_formats import ALIASES, AUTO, TOOL_FORMATS, tool_format
from opd.tool_formats.records import BadCall, WrittenCalls, between_tags
from opd.tool_formats.schema import list_schema_types

ADD = Tool(
    name="add",
    description="Add two numbers.",
    parameters={"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}, "required": ["a", "b"]},
)  # fmt: skip
RUN = Tool(
    name="run",
    description="Run.",
    parameters={"type": "object", "properties": {"command": {"type": "string"}, "options": {"type": "object"}, "loud": {"type": "boolean"}, "lines": {"type": "array"}, "most": {"anyOf": [{"type": "integer"}, {"type": "null"}]}, "level": {"enum": [1, 2]}, "share": {"type": ["number", "null"]}}},
)  # fmt: skip
TOOLS = (ADD, RUN)
ONE = ToolCall(name="add", arguments={"a": 1, "b": 2})
TWO = ToolCall(name="add", arguments={"a": 3, "b": 4})

HERMES = '<tool_call>\n{"name": "add", "arguments": {"a": %d, "b": %d}}\n</tool_call>'
LLAMA = '{"name": "add", "parameters": {"a": %d, "b": %d}}'
XML = "<tool_call>\n<function=add>\n<parameter=a>\n%d\n</parameter>\n<parameter=b>\n%d\n</parameter>\n</function>\n</tool_call>"
LISTED = '{"name": "add", "arguments": {"a": %d, "b": %d}}'
NAMED = '[TOOL_CALLS]add[ARGS]{"a": %d, "b": %d}'


def test_the_pipeline_takes_the_same_names() -> None:
    for name in (AUTO, *TOOL_FORMATS, *ALIASES):
        assert StudentConfig(model="m", tool_call_parser=name).tool_call_parser == name
    assert tool_format("qwen3_coder") is TOOL_FORMATS["qwen3_xml"]


@pytest.mark.parametrize(
    ("name", "text", "calls", "around"),
    [
        ("hermes", f"Well. {HERMES % (1, 2)} and {HERMES % (3, 4)}", (ONE, TWO), "Well.  and "),
        ("qwen3_xml", f"Well. {XML % (1, 2)} and {XML % (3, 4)}", (ONE, TWO), "Well.  and "),
        ("llama3_json", LLAMA % (1, 2), (ONE,), ""),
        ("llama3_json", f"{LLAMA % (1, 2)}; {LLAMA % (3, 4)}\n", (ONE, TWO), ""),
        ("llama3_json", f"<|python_tag|>{LLAMA % (1, 2)};<|python_tag|>{LLAMA % (3, 4)}", (ONE, TWO), ""),
        ("llama3_json", f"Well, {{x}}. {LLAMA % (1, 2)} Done.", (ONE,), "Well, {x}.  Done."),
        ("llama3_json", '{"type": "function", "name": "add", "arguments": {"a": 1, "b": 2}}', (ONE,), ""),
        ("mistral", f"Well. {NAMED % (1, 2)}{NAMED % (3, 4)}", (ONE, TWO), "Well. "),
        ("mistral", f"[TOOL_CALLS] [{LISTED % (1, 2)}, {LISTED % (3, 4)}]", (ONE, TWO), ""),
        ("mistral", f"[TOOL_CALLS]{LISTED % (1, 2)}", (ONE,), ""),
        ("mistral", '[TOOL_CALLS]add[CALL_ID]aB3dE6gH9[ARGS]{"a": 1, "b": 2}', (ONE,), ""),
        ("mistral", '[TOOL_CALLS]add{"a": 1, "b": 2}', (ONE,), ""),
        ("pythonic", " [add(a=1, b=2),\n add(b=4, a=3)]\n", (ONE, TWO), ""),
        ("pythonic", "<|python_tag|>[add(a=1, b=2)]", (ONE,), ""),
        ("llama4_pythonic", "<|python_start|>[add(a=1, b=2)]<|python_end|>", (ONE,), ""),
        ("llama4_pythonic", "[add(a=1, b=2)]", (ONE,), ""),
    ],
)
def test_calls_are_read_with_the_text_beside_them(
    name: str, text: str, calls: tuple[ToolCall, ...], around: str
) -> None:
    assert tool_format(name).read(text, TOOLS) == WrittenCalls(calls, around)


@pytest.mark.parametrize("name", TOOL_FORMATS)
@pytest.mark.parametrize(
    "text",
    ["", "no call at all", "add 1 and 2", "a set {x}, {1: 2", '{"answer": 3}', '{"name": "Bob"}', "[1, 2]", "[see] add(a=1)", "\x00\x1b"],
)  # fmt: skip
def test_other_text_is_text(name: str, text: str) -> None:
    assert tool_format(name).read(text, TOOLS) == WrittenCalls((), text)


@pytest.mark.parametrize(
    ("name", "text", "told"),
    [
        ("hermes", "<tool_call>{", "needs its </tool_call>"),
        ("hermes", "{}</tool_call>", "needs its </tool_call>"),
        ("hermes", "<tool_call>{'name': 'add'}</tool_call>", "not JSON"),
        ("hermes", f"<tool_call>{'[' * 100_000}</tool_call>", "not JSON"),
        ("hermes", '<tool_call>{"name": "run", "arguments": {"command": "a\nb"}}</tool_call>', "control character"),
        ("hermes", "<tool_call>[1]</tool_call>", "wanted"),
        ("hermes", XML % (1, 2), "not JSON"),
        ("qwen3_xml", "<tool_call>\n<function=add>", "needs its </tool_call>"),
        ("qwen3_xml", "<function=add></function>", "stands between <tool_call>"),
        ("qwen3_xml", HERMES % (1, 2), "wanted <function=NAME>"),
        ("qwen3_xml", "<tool_call><function=add>a=1</function></tool_call>", "wanted <parameter=ARGUMENT>"),
        ("qwen3_xml", (XML % (1, 2)).replace("=b>", "=a>"), "'a' is there twice"),
        ("qwen3_xml", (XML % (1, 2)).replace("</parameter>\n</function>", "</function>"), "wanted <parameter=ARGUMENT>"),
        ("llama3_json", (LLAMA % (1, 2))[:-1], "a call that is no JSON"),
        ("llama3_json", f"{LLAMA % (1, 2)}; {(LLAMA % (3, 4))[:9]}", "a call that is no JSON"),
        ("llama3_json", '{"name": "run", "parameters": {"command": "a\x00"}}', "control character"),
        ("llama3_json", '{"name": "add", "parameters": [1, 2]}', "wanted object"),
        ("llama3_json", "<|python_tag|>print(1)", "after <|python_tag|>"),
        ("llama3_json", '{"name":' * 100_000, "a call that is no JSON"),
        ("mistral", "[TOOL_CALLS]", "wanted NAME[ARGS]"),
        ("mistral", "[TOOL_CALLS][]", "wanted NAME[ARGS]"),
        ("mistral", "[TOOL_CALLS]add a b", "wanted NAME[ARGS]"),
        ("mistral", "[TOOL_CALLS]add[ARGS]{1}", "not JSON after [TOOL_CALLS]add[ARGS]"),
        ("mistral", '[TOOL_CALLS]run[ARGS]{"command": "a\x1b"}', "ontrol character"),
        ("mistral", f"{NAMED % (1, 2)} done", "not JSON"),
        ("mistral", f"[TOOL_CALLS] [{LISTED % (1, 2)}", "not JSON"),
        ("mistral", '[TOOL_CALLS][{"name": "add", "arguments": "1"}]', "wanted object"),
        ("mistral", f"[TOOL_CALLS]{'[' * 100_000}", "not JSON"),
        ("pythonic", "[add(a=1, b=2)", "no Python list"),
        ("pythonic", "[add(a=1, b=2)] done", "no Python list"),
        ("pythonic", "[add(a=1)][0]", "has to be the whole turn"),
        ("pythonic", "I add. [add(a=1, b=2)]", "has to be the whole turn"),
        ("pythonic", "[add(1, 2)]", "every argument needs its name"),
        ("pythonic", "[add(**{})]", "every argument needs its name"),
        ("pythonic", "[add(a=1), 2]", "wanted calls alone"),
        ("pythonic", "[add(a=x)]", "have to be texts in quotes"),
        ("pythonic", "[add(a=__import__('os').system('ls'))]", "have to be texts in quotes"),
        ("pythonic", "[add(a=b'1')]", "have to be texts in quotes"),
        ("pythonic", "[add(a=-True)]", "have to be texts in quotes"),
        ("pythonic", "[run(options={1: 2})]", "have to be texts in quotes"),
        ("pythonic", "[run(command='a\x00')]", "no Python list"),
        ("pythonic", "[run(command='a\nb')]", "no Python list"),
        ("pythonic", "[run(command='\ud800')]", "no Python list"),
        ("pythonic", f"[add(a={'(' * 100_000}", "no Python list"),
        ("pythonic", f"[add(a={'-' * 100_000}1)]", "no Python list"),
        ("pythonic", f"[add(a=0x{'f' * 4000})]", "more than 4300 digits"),
        ("pythonic", f"[add(a=[-0x{'f' * 4000}])]", "more than 4300 digits"),
        ("llama4_pythonic", "<|python_start|>print(1)<|python_end|>", "has to be the whole turn"),
    ],
)  # fmt: skip
def test_a_call_that_cannot_be_read_says_why(name: str, text: str, told: str) -> None:
    begun = time.perf_counter()
    with pytest.raises(BadCall) as caught:
        tool_format(name).read(text, TOOLS)
    assert told in str(caught.value)
    assert time.perf_counter() - begun < 5


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("hermes", '<tool_call>{"name": "ru\\u0007n", "arguments": 4}</tool_call>'),
        ("qwen3_xml", "<tool_call><function=ru\x07n>x</function></tool_call>"),
        ("qwen3_xml", (XML % (1, 2)).replace("=add>", "=ru\x07n>").replace("=b>", "=a>")),
        ("mistral", '[TOOL_CALLS]ru\x07n[ARGS]{"a}'),
    ],
)
def test_the_reason_can_be_read_whatever_the_call_has_in_it(name: str, text: str) -> None:
    with pytest.raises(BadCall) as caught:
        tool_format(name).read(text, TOOLS)
    assert "run" in str(caught.value)


VALUES: tuple[dict[str, Any], ...] = (
    {},
    {"command": "ls -l", "loud": True, "lines": [1, "two", None], "options": {"a": {"b": [False, 2.5]}}},
    {"command": "a \"b\" 'c' \\d\n  e\ttab [1](2) {3}; café", "most": None, "level": 2, "share": -1.5},
    {"command": "12", "most": -7, "loud": False, "share": None},
)


@pytest.mark.parametrize("name", TOOL_FORMATS)
def test_what_is_written_is_read_back(name: str) -> None:
    form = tool_format(name)
    for number in (1, 2):
        for values in VALUES:
            calls = (ToolCall(name="run", arguments=values), ONE)[:number]
            found = form.read(form.write(calls), TOOLS)
            assert found.calls == calls and not found.text.strip()


@pytest.mark.parametrize("name", TOOL_FORMATS)
def test_broken_calls_end_in_calls_text_or_a_reason(name: str) -> None:
    """A weak model writes anything: parts of calls of every format, with odd characters between them."""
    pieces = [HERMES % (1, 2), XML % (1, 2), LLAMA % (1, 2), NAMED % (1, 2), "[add(a=1, b=2)]", *"{}[]()<>\"'\\;=,:\n\t\x00\x1b\u2028\ud800", "<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[ARGS]", "<|python_tag|>"]  # fmt: skip
    rng, form = random.Random(name), tool_format(name)
    for _ in range(2000):
        text = "".join(rng.choices(pieces, k=rng.randint(1, 4)))
        cut = text[: rng.randint(0, len(text))] if rng.random() < 0.5 else text
        try:
            found = form.read(cut, TOOLS)
        except BadCall as error:
            assert str(error)
            continue
        assert found.calls or found.text == cut


def test_values_without_quotes_get_the_types_of_the_schema() -> None:
    def read(**values: str) -> dict[str, Any]:
        inside = "".join(f"<parameter={key}>\n{text}\n</parameter>\n" for key, text in values.items())
        (call,) = (
            tool_format("qwen3_xml").read(f"<tool_call><function=run>{inside}</function></tool_call>", TOOLS).calls
        )
        return dict(call.arguments)

    assert read(command="12") == {"command": "12"}, "a text stays one"
    assert read(command="  a\n\nb ") == {"command": "  a\n\nb "}, "with all of its blanks"
    assert read(loud="True", most="null", level="2", share="0.5") == {
        "loud": True,
        "most": None,
        "level": 2,
        "share": 0.5,
    }
    assert read(lines="[1, 2]", options='{"a": 1}') == {"lines": [1, 2], "options": {"a": 1}}
    assert read(loud="yes", most="1 1", lines="{}") == {"loud": "yes", "most": "1 1", "lines": "{}"}, (
        "refused by the schema"
    )
    assert read(other="3") == {"other": "3"}


def test_types_that_a_schema_names() -> None:
    assert list_schema_types({"type": ["string", "null", 3]}) == {"string", "null"}
    assert list_schema_types({"anyOf": [{"type": "integer"}, {"enum": [None, "a"]}, True]}) == {
        "integer",
        "null",
        "string",
    }
    assert list_schema_types({"type": 3}) == list_schema_types({"anyOf": 3}) == list_schema_types({}) == set()


LOOPS = [
    "<tool_call>",
    "</tool_call>",
    '{"a" ',
    "{",
    '{"a":{',
    '{"\\"',
    "[TOOL_CALLS]",
    "[add(a=1), ",
    "<parameter=b>",
    "add ",
    " ",
    "\n",
]


@pytest.mark.parametrize("name", TOOL_FORMATS)
@pytest.mark.parametrize(
    "begun", ["", "<tool_call><function=add><parameter=a>1</parameter>", "[TOOL_CALLS]add", "[add(a="]
)
def test_a_turn_that_loops_is_read_in_a_time_that_grows_with_its_length(name: str, begun: str) -> None:
    """So long that the square of it would be many minutes: that the test ends is what it shows."""
    for piece in LOOPS:
        text = begun + piece * 100_000 + "</parameter></function></tool_call>"
        with suppress(BadCall):
            tool_format(name).read(text, TOOLS)


def test_pairs_of_tags_have_nothing_else_between_them() -> None:
    """Every order of up to six tags: pairs side by side are read, all others are half a pair."""
    for count in range(7):
        for tags in itertools.product(("<tool_call>", "</tool_call>"), repeat=count):
            text = "".join(f"{place}{tag}" for place, tag in enumerate(tags)) + "."
            if tags == ("<tool_call>", "</tool_call>") * (count // 2):
                found = [str(place) for place in range(1, count, 2)]
                assert between_tags(text) == (found, "".join(map(str, range(0, count, 2))) + ".")
            else:
                with pytest.raises(BadCall):
                    between_tags(text)


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1e999", "-1e999"])
def test_a_number_that_json_has_not_is_no_argument(number: str) -> None:
    """Python reads and writes it; a program that gets the call could not read it."""
    call = f'{{"name": "run", "arguments": {{"share": {number}}}}}'
    for name, text in {
        "hermes": f"<tool_call>{call}</tool_call>",
        "llama3_json": call,
        "mistral": f"[TOOL_CALLS][{call}]",
        "pythonic": f"[run(share={number})]",
    }.items():
        with pytest.raises(BadCall):
            tool_format(name).read(text, TOOLS)
    xml = f"<tool_call><function=run><parameter=share>{number}</parameter></function></tool_call>"
    (found,) = tool_format("qwen3_xml").read(xml, TOOLS).calls
    assert found.arguments == {"share": number}, "a text, which the schema refuses"
    with pytest.raises(BadCall, match="share"):
        read_plain_calls(f'run {{"share": {number}}}', TOOLS)
