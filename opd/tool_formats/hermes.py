"""Hermes' convention, which Qwen 2.5, Qwen 3 and many others share: JSON between tags.

Let me see. <tool_call>
{"name": "add", "arguments": {"a": 1, "b": 2}}
</tool_call>
"""

from __future__ import annotations

import json
from collections.abc import Sequence

from opd.records.environments import Tool, ToolCall
from opd.tool_formats.records import BEGINS, CLOSE, OPEN, WrittenCalls, between_tags, in_tags, parse_call, parse_json

WHERE = "between the tags"


class Hermes:
    """Any number of calls, each between tags of its own, with text around them."""

    marks: tuple[str, ...] = (OPEN, CLOSE)
    begins, ends = BEGINS, CLOSE
    instructions = f"""To call one, write a JSON object with its name and its arguments between tags; you may write several:
{OPEN}
{{"name": "NAME", "arguments": {{"ARGUMENT": "VALUE"}}}}
{CLOSE}"""

    def read(self, text: str, tools: Sequence[Tool]) -> WrittenCalls:
        insides, around = between_tags(text)
        return WrittenCalls(tuple(parse_call(parse_json(inside, WHERE), WHERE) for inside in insides), around)

    def write(self, calls: Sequence[ToolCall]) -> str:
        return in_tags([json.dumps({"name": call.name, "arguments": dict(call.arguments)}) for call in calls])
