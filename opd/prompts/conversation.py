"""Convert conversations in users' files to the form that chat templates read.

That form has messages with one text each, calls of tools, descriptions of tools, and variables of the template. Files may be
in the forms of OpenAI, TRL and ShareGPT.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from opd.config.prompts import RENDERING
from opd.prompts.broken_rows import BrokenRow

Messages = list[dict[str, Any]]
"""Each message has `role` and `content`, both text; messages of the assistant may have `tool_calls`."""
SPEAKERS = {"human": "user", "gpt": "assistant"}
"""ShareGPT's name of a role -> name in chat templates."""
SYSTEM_ROLES = ("system", "developer")
TEXT_PARTS = ("text", "input_text", "output_text")
"""Types of parts of a message that are text."""
FROM_SHAREGPT = (
    """python3 -c 'import json, sys; who = {"human": "user", "gpt": "assistant"}; new = lambda ms: [{"role": """
    """who.get(m["from"], m["from"]), "content": m["value"]} for m in ms]; [print(json.dumps({**(d := json.loads(l)), """
    """**{c: new(d[c]) for c in ("prompt", "completion") if c in d}})) for l in sys.stdin]' < OLD.jsonl > NEW.jsonl"""
)
"""Command for the user that turns `from` and `value` into `role` and `content`."""


def rename_turn_keys(message: Any) -> Any:
    """Return a message with `role` and `content`, if it has `from` and `value` in their place; else the message itself."""
    if not (isinstance(message, dict) and isinstance(message.get("from"), str) and "value" in message):
        return message
    return {"role": SPEAKERS.get(message["from"], message["from"]), "content": message["value"]}


def is_learned(message: Mapping[str, Any]) -> bool:
    """Return False for a turn that is not to be learned: one with OpenAI's `weight` 0."""
    return bool(message.get("weight", 1))


def read_messages(column: str, messages: list[Any]) -> Messages:
    """Return the messages of a column. Raises: BrokenRow naming the column and the message."""
    clean_messages = []
    for number, message in enumerate(messages, start=1):
        try:
            clean_messages.append(_read_message(message))
        except BrokenRow as problem:
            raise BrokenRow(f"column `{column}`, message {number}: {problem.fault}", problem.fix) from None
    return clean_messages


def _read_message(message: Any) -> dict[str, Any]:
    """Return a message with its parts joined to one text, and without OpenAI's `weight`. Raises: BrokenRow."""
    fix = "give every message a `role` and a `content`, both text"
    if not isinstance(message, dict):
        raise BrokenRow(f"{message!r:.60}", fix)
    calls = message.get("tool_calls")
    if calls:
        message = {"content": None, **message}  # OpenAI's API leaves out the text of a turn that only calls
    if not message.keys() >= {"role", "content"}:
        fix = FROM_SHAREGPT if message.keys() >= {"from", "value"} else fix
        raise BrokenRow(f"the keys {list_keys(message)}" if message else "no keys", fix)
    if "function_call" in message:
        raise BrokenRow("a `function_call`, the form before `tool_calls`", "write it as one of `tool_calls`")
    if message.get("weight", 1) not in (0, 1):
        raise BrokenRow(
            f"the `weight` {message['weight']!r:.60}", "give turns of the assistant the weight 0 or 1, or none"
        )
    fields = {key: value for key, value in message.items() if key != "weight"}
    fields["content"] = "" if calls and fields["content"] is None else join_text_parts(fields["content"])
    if calls:
        fields["tool_calls"] = [_read_call(call) for call in (calls if isinstance(calls, list) else [calls])]
    odd = next((key for key in ("role", "content") if not isinstance(fields[key], str)), "")
    if odd:
        raise BrokenRow(f"`{odd}` is no text: {fields[odd]!r:.60}", fix)
    if not fields["role"]:
        raise BrokenRow("an empty `role`", fix)
    return fields


def join_text_parts(content: Any) -> Any:
    """Return the text of a list of parts, joined by line breaks as vLLM does; other content as it is. Raises: BrokenRow."""
    if not isinstance(content, list):
        return content
    texts = []
    for part in content:
        kind = part.get("type") if isinstance(part, dict) else None
        text = part if isinstance(part, str) else part.get("text") if kind in TEXT_PARTS else None
        if not isinstance(text, str):
            raise BrokenRow(
                f"`content` is no text: {f'a part of type `{kind:.40}`' if isinstance(kind, str) else f'the part {part!r:.60}'}",
                'delete this line: only text is read, such as [{"type": "text", "text": "2+2="}]',
            )
        texts.append(text)
    return "\n".join(texts)


def _read_call(call: Any) -> dict[str, Any]:
    """Return a call with its arguments as a mapping, which templates need. OpenAI's API has them as JSON text.

    Raises: BrokenRow.
    """
    function = call.get("function", call) if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise BrokenRow(
            f"the call {call!r:.60}",
            'give calls as {"type": "function", "function": {"name": ..., "arguments": {...}}}',
        )
    arguments = _parse_json(function.get("arguments") or {})
    if not isinstance(arguments, dict):
        raise BrokenRow(f"the arguments {function['arguments']!r:.60}", "give arguments as a mapping, or as its JSON")
    around = call if "function" in call else {"type": "function"}
    return {**around, "function": {**function, "arguments": arguments}}


def add_system_message(messages: Messages, system: Any, column: str) -> Messages:
    """Return the messages with the text of the row's system column as the first message.

    Raises: BrokenRow if they already begin with another system message, or if `system` is no text.
    """
    if not isinstance(system, str):
        raise BrokenRow(f"column `{column}`: {system!r:.60}, no text", _advise_skipping("system"))
    if not system.strip() or not messages:
        return messages
    opening = messages[0]
    if opening["role"] not in SYSTEM_ROLES:
        return [{"role": "system", "content": system}, *messages]
    if opening["content"].strip() != system.strip():
        raise BrokenRow(
            f"column `{column}` beside messages that begin with another system message", _advise_skipping("system")
        )
    return messages


def read_tools(value: Any, column: str) -> list[dict[str, Any]]:
    """Return the tools of a row in the form that chat templates take. Raises: BrokenRow.

    `value` is a list, or the JSON text of one. Each tool is a mapping with `function`, or just the function's description.
    """
    tools = _parse_json(value)
    tools = [_complete_tool(_parse_json(tool)) for tool in tools] if isinstance(tools, list) else [None]
    if None in tools:
        raise BrokenRow(
            f"column `{column}`: {value!r:.60}",
            'give tools as a list of {"type": "function", "function": {"name": ...}}, or do not read them: '
            "`prompts: {path: ..., columns: {tools: null}}`",
        )
    return [tool for tool in tools if tool is not None]


def _complete_tool(tool: Any) -> dict[str, Any] | None:
    """Return a tool with its description under `function`; None if the value is no tool."""
    if isinstance(tool, dict) and "function" not in tool:
        tool = {"type": "function", "function": tool}
    function = tool["function"] if isinstance(tool, dict) else None
    return tool if isinstance(function, dict) and isinstance(function.get("name"), str) else None


def read_variables(value: Any, column: str) -> dict[str, Any]:
    """Return the variables that a row gives the chat template: a mapping, or the JSON of one. Raises: BrokenRow."""
    variables = _parse_json(value)
    if not isinstance(variables, dict):
        raise BrokenRow(f"column `{column}`: {value!r:.60}, no mapping", _advise_skipping("chat_template_kwargs"))
    if odd := RENDERING.intersection(variables):
        raise BrokenRow(f"column `{column}`: `{min(odd)}`, which is no variable of a template", "leave it out")
    return {name: entry for name, entry in variables.items() if entry is not None}


def _parse_json(value: Any) -> Any:
    """Return the value of a JSON text; another value, and a text that is no JSON, as it is."""
    try:
        return json.loads(value) if isinstance(value, str) else value
    except (RecursionError, ValueError):
        return value


def _advise_skipping(column: str) -> str:
    return f"correct it, or do not read this column: `prompts: {{path: ..., columns: {{{column}: null}}}}`"


def list_keys(data: Mapping[str, Any]) -> str:
    """Return the first keys of a mapping, for messages."""
    return ", ".join(f"`{key:.40}`" for key in list(data)[:8])
