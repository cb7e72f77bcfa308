"""The convention of Qwen3-Coder and Qwen 3.5: a function and its parameters as tags, the values as they are.

Let me see. <tool_call>
<function=add>
<parameter=a>
1
</parameter>
</function>
</tool_call>
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from opd.records.environments import Tool, ToolCall
from opd.records.json_fields import parse_strict_json
from opd.tool_formats.records import BEGINS, CLOSE, OPEN, BadCall, WrittenCalls, between_tags, in_tags
from opd.tool_formats.schema import fits_type, list_schema_types, schema_properties

_FUNCTION = re.compile(r"\s*<function=([^>\n]+)>(.*)</function>\s*", re.DOTALL)
_PARAMETER = re.compile(r"\s*<parameter=([^>\n]+)>(.*?)</parameter>\s*", re.DOTALL)
_WORDS = {"true": True, "false": False, "null": None, "none": None}
"""Also as Python writes them: chat templates do."""


class Qwen3Xml:
    """Any number of calls, each between tags of its own, with text around them."""

    marks: tuple[str, ...] = (OPEN, CLOSE)
    begins, ends = BEGINS, CLOSE
    instructions = f"""To call one, write its name and its arguments between tags; you may write several:
{OPEN}
<function=NAME>
<parameter=ARGUMENT>
VALUE
</parameter>
</function>
{CLOSE}"""

    def read(self, text: str, tools: Sequence[Tool]) -> WrittenCalls:
        insides, around = between_tags(text)
        if "<function=" in around:
            raise BadCall(f"every <function=...> stands between {OPEN} and {CLOSE}")
        return WrittenCalls(tuple(_read_call(inside, tools) for inside in insides), around)

    def write(self, calls: Sequence[ToolCall]) -> str:
        return in_tags([_write_call(call) for call in calls])


def _write_call(call: ToolCall) -> str:
    values = ((name, v if isinstance(v, str) else json.dumps(v, default=dict)) for name, v in call.arguments.items())
    inside = "".join(f"<parameter={name}>\n{value}\n</parameter>\n" for name, value in values)
    return f"<function={call.name}>\n{inside}</function>"


def _read_call(inside: str, tools: Sequence[Tool]) -> ToolCall:
    """Read a call. Raises: BadCall."""
    match = _FUNCTION.fullmatch(inside)
    if match is None:
        raise BadCall("wanted <function=NAME>...</function> between the tags")
    name, body = match[1].strip(), match[2]
    properties = next((schema_properties(tool.parameters) for tool in tools if tool.name == name), {})
    arguments: dict[str, Any] = {}
    for key, text in _read_parameters(name, body):
        if key in arguments:
            raise BadCall(f"{name:.60}: the parameter {key!r:.60} is there twice")
        arguments[key] = _read_value(text, properties.get(key, {}))
    return ToolCall(name=name, arguments=arguments)


def _read_parameters(name: str, body: str) -> Iterator[tuple[str, str]]:
    """Yield name and text of each parameter. Raises: BadCall for anything else in the function."""
    at, end = 0, len(body.rstrip())
    while at < end:
        match = _PARAMETER.match(body, at)
        if match is None:
            raise BadCall(f"{name:.60}: wanted <parameter=ARGUMENT>...</parameter> and nothing else")
        yield match[1].strip(), match[2].removeprefix("\n").removesuffix("\n")
        at = match.end()


def _read_value(text: str, schema: Mapping[str, Any]) -> Any:
    """Return the value that a text stands for, of the type that the schema wants; the text itself if it fits none."""
    kinds = list_schema_types(schema)
    word = text.strip().lower()
    if "null" in kinds and word == "null":
        return None
    if not kinds or "string" in kinds:
        return text
    try:
        value = _WORDS[word] if word in _WORDS else parse_strict_json(text)
    except (ValueError, RecursionError):
        return text
    return value if any(fits_type(value, kind) for kind in kinds) else text
