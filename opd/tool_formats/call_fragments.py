"""Calls that somebody could read out of a text which is no clean turn: of any format, closed or not.

A program may take commands out of text by itself, and more patiently than our formats do. What it could find there the guard has to see.
"""

from __future__ import annotations

import json
import re
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from itertools import zip_longest
from typing import Any

from opd.records.environments import ToolCall
from opd.tool_formats.records import CLOSE, OPEN, Uncounted

_OBJECT = re.compile(r"""\{\s*["'](?:name|arguments|parameters|input|type|function|id|command|cmd|script|code)["']""")
_CALL = re.compile(r"""\{\s*["'](?:name|type|function)["']""")
_MARK = re.compile("|".join(map(re.escape, (OPEN, CLOSE, "[TOOL_CALLS]", "<|python_tag|>"))))
_PAIR = re.compile(r"""(?<!\w)(\w++)["']?\s*+[:=]\s*+(?:"((?:[^"\\]|\\.)*+)|'((?:[^'\\]|\\.)*+))""", re.DOTALL)
"""A key and a text in quotes, of JSON or of Python, the text closed or not."""
_FUNCTION = re.compile(r'<function=([^>\n]+)>|invoke name="([^"\n]+)"|<tool_call>\s*+([\w.-]++)(?=\s*+<arg_key>)')
_PARAMETER = re.compile(
    r"""(?:<parameter=([^>\n]+)>|parameter\ name="([^"\n]+)"[^>\n]*>|<arg_key>([^<\n]+)</arg_key>\s*+<arg_value>)
    (.*?)(?=</[^<>\n]*(?:parameter|function|invoke|arg_value|tool_call)>|<parameter=|parameter\ name=|<arg_key>|\Z)""",
    re.DOTALL | re.VERBOSE,
)
_NAMED = re.compile(r"\[TOOL_CALLS\]\s*+([^\s\[{]++)\s*+(?:\[CALL_ID\][^\s\[{]*+)?(?:\[ARGS\])?\s*+(?=\{)")
_LISTED = re.compile(r"[\[,]\s*([A-Za-z_]\w*)\s*\(")
_ARGUMENTS = ("arguments", "parameters", "input")
_LENIENT = json.JSONDecoder(strict=False)


def find_begun_calls(text: str) -> tuple[ToolCall, ...]:
    """Return every call that is begun in a text, each once, with those of its arguments that can be made out."""
    calls = (*_read_object_calls(text), *_read_tagged_calls(text), *_read_named_calls(text), *_read_listed_calls(text))
    return tuple({repr(call): call for call in calls}.values())


def _read_object_calls(text: str) -> Iterator[ToolCall]:
    """Yield the calls of objects with a name and arguments, as Hermes, Llama and Mistral write them, and such arguments alone."""
    text, end = Uncounted(text), 0
    marks = [mark.start() for mark in _MARK.finditer(text)]
    for begun in _OBJECT.finditer(text):
        if begun.start() < end:  # inside of one that was read
            continue
        data, end = _read_object(text, begun.start(), marks)
        if not data:
            following = _CALL.search(text, begun.end())
            end = len(text) if following is None else following.start()
            data = _read_pairs(text[begun.start() : end])
        inner = data.get("function")  # as OpenAI's API writes a call
        data = inner if isinstance(inner, Mapping) else data
        arguments = next((data[key] for key in _ARGUMENTS if key in data), None)
        if isinstance(arguments, str):
            arguments, _ = _read_object(arguments, 0)
        name = data.get("name")
        other_values = {key: value for key, value in data.items() if key not in ("name", "type", "id", *_ARGUMENTS)}
        if call_arguments := arguments if isinstance(arguments, Mapping) else other_values:
            yield ToolCall(name=name if isinstance(name, str) else "", arguments=dict(call_arguments))


def _read_tagged_calls(text: str) -> Iterator[ToolCall]:
    """Yield the calls that are tags for functions and parameters, as Qwen3-Coder, DeepSeek V3.2 and GLM write them."""
    for match, region in _split_regions(_FUNCTION, text):
        arguments = {
            "".join(names).strip(): value.removeprefix("\n").removesuffix("\n")
            for *names, value in _PARAMETER.findall(region)
        }
        yield ToolCall(name="".join(match.groups("")).strip(), arguments=arguments)


def _read_named_calls(text: str) -> Iterator[ToolCall]:
    """Yield the calls that are a name after Mistral's mark, then arguments."""
    for match in _NAMED.finditer(text):
        yield ToolCall(name=match[1], arguments=_read_object(text, match.end())[0])


def _read_listed_calls(text: str) -> Iterator[ToolCall]:
    """Yield the calls in a Python list, those whose arguments are texts."""
    for match, region in _split_regions(_LISTED, text):
        if pairs := _read_pairs(region):
            yield ToolCall(name=match[1], arguments=pairs)


def _split_regions(pattern: re.Pattern[str], text: str) -> Iterator[tuple[re.Match[str], str]]:
    """Yield each match, and the text from it up to the next one."""
    matches = list(pattern.finditer(text))
    for match, following in zip_longest(matches, matches[1:]):
        yield match, text[match.start() : following.start() if following else len(text)]


def _read_object(text: str, start: int, marks: Sequence[int] = ()) -> tuple[Mapping[str, Any], int]:
    """Return the object that begins here, completed if the text, or its tag, ends before it does, and where it ends; empty if it
    cannot be made out. `marks` are the places of tags."""
    data, end = _decode_object(text, start)
    if not data and (index := bisect_left(marks, start)) < len(marks):
        part = text[start : marks[index]]
        data, end = _decode_object(part, 0)
        end += start
    return data, end


def _decode_object(text: str, start: int) -> tuple[Mapping[str, Any], int]:
    try:
        data, end = _LENIENT.raw_decode(text, start)
    except json.JSONDecodeError as error:
        if error.pos < len(text.rstrip()) and not error.msg.startswith("Unterminated"):
            return {}, start  # something else is wrong than that it ends too early
        try:
            data, end = _LENIENT.decode(_complete_json(text[start:])), len(text)
        except (ValueError, RecursionError):
            return {}, start
    except (ValueError, RecursionError):
        return {}, start
    return (data, end) if isinstance(data, Mapping) else ({}, start)


def _complete_json(text: str) -> str:
    """Return the beginning of a JSON value with what closes it."""
    closing: list[str] = []
    quoted = escaped = False
    for character in text:
        if quoted:
            quoted, escaped = escaped or character != '"', character == "\\" and not escaped
        elif character == '"':
            quoted = True
        elif character in "{[":
            closing.append("}" if character == "{" else "]")
        elif character in "}]" and closing:
            closing.pop()
    complete = text[:-1] if escaped else text
    return complete.rstrip(", \n\t" if not quoted else "") + '"' * quoted + "".join(reversed(closing))


def _read_pairs(text: str) -> dict[str, str]:
    """Return keys and the texts in quotes that follow them."""
    pairs = {}
    for key, double, single in _PAIR.findall(text):
        inside = double or single.replace("\\'", "'").replace('"', '\\"')
        try:
            pairs[key] = str(_LENIENT.decode(f'"{inside}"'))
        except ValueError:
            pairs[key] = double or single
    return pairs
