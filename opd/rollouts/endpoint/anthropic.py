"""Anthropic's messages: requests with tools, replies whole and as server-sent events."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from opd.records.environments import Tool
from opd.rollouts.endpoint import json_values
from opd.rollouts.endpoint.messages import (
    ApiError,
    Call,
    Message,
    Problem,
    Reply,
    Request,
    list_other_keys,
    make_request_error,
    request_hash,
    split_for_stream,
)

READ = (
    "model", "messages", "system", "tools", "tool_choice", "stop_sequences", "max_tokens", "stream", "metadata", "service_tier",
)  # fmt: skip
"""Settings that are followed, or that do not change a reply. All other settings are decided by the training, whatever the client gives."""
KINDS: dict[Problem, str] = {
    "invalid": "invalid_request_error",
    "context": "invalid_request_error",
    "authentication": "authentication_error",
    "permission": "permission_error",
    "not_found": "not_found_error",
    "too_large": "request_too_large",
    "engine": "api_error",
}
WAITING = b'event: ping\ndata: {"type": "ping"}\n\n'
"""An event that clients skip; it keeps the connection in use."""


def parse(body: Mapping[str, Any]) -> Request:
    """Read a request. Raises: ApiError."""
    choice = json_values.read_mapping(body.get("tool_choice") or {}, "tool_choice").get("type", "auto")
    limit = json_values.read_positive_integer(body.get("max_tokens"), "max_tokens")
    if limit is None:
        raise make_request_error("max_tokens: expected a whole number of at least 1, found nothing")
    system = json_values.read_content(body.get("system"), "system")
    return Request(
        model=json_values.read_text(body.get("model", ""), "model"),
        messages=(*([Message(role="system", text=system)] if system else []), *_parse_messages(body)),
        tools=() if choice == "none" else tuple(_parse_tools(body)),
        max_tokens=limit,
        stop=tuple(
            json_values.read_text(stop, "stop_sequences")
            for stop in json_values.read_list(body.get("stop_sequences"), "stop_sequences")
            if stop != ""
        ),
        stream=bool(body.get("stream")),
        overridden=list_other_keys(body, READ) + (() if choice in ("auto", "none") else ("tool_choice",)),
        identity=request_hash(body),
    )


def _parse_messages(body: Mapping[str, Any]) -> Iterator[Message]:
    for path, message in json_values.read_mappings(body.get("messages"), "messages"):
        role, content = message.get("role"), message.get("content")
        if role not in ("user", "assistant"):
            raise make_request_error(f"{path}.role: expected user or assistant, found {role!r:.40}")
        parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
        blocks = [block for _, block in json_values.read_mappings(parts, f"{path}.content")]
        yield from _read_user_turn(blocks, path) if role == "user" else _read_assistant_turn(blocks, path)


def _read_user_turn(blocks: list[Mapping[str, Any]], path: str) -> Iterator[Message]:
    """Yield the messages of a user's turn: results of tools as messages of their own, before what the user says."""
    results = [block for block in blocks if block.get("type") == "tool_result"]
    for block in results:
        called = json_values.read_text(block.get("tool_use_id"), f"{path}.content: tool_use_id")
        yield Message(
            role="tool", text=json_values.read_content(block.get("content"), f"{path}.content"), answers=called
        )
    text_blocks = [block for block in blocks if block.get("type") != "tool_result"]
    if text_blocks or not results:
        yield Message(role="user", text=json_values.read_content(text_blocks, f"{path}.content"))


def _read_assistant_turn(blocks: list[Mapping[str, Any]], path: str) -> Iterator[Message]:
    text_blocks = [block for block in blocks if block.get("type") != "tool_use"]
    calls = tuple(
        Call(
            id=json_values.read_text(block.get("id"), f"{path}.content: id"),
            name=json_values.read_text(block.get("name"), f"{path}.content: name"),
            arguments=json_values.read_mapping(block.get("input"), f"{path}.content: input"),
        )
        for block in blocks
        if block.get("type") == "tool_use"
    )
    yield Message(role="assistant", text=json_values.read_content(text_blocks, f"{path}.content"), calls=calls)


def _parse_tools(body: Mapping[str, Any]) -> Iterator[Tool]:
    for path, tool in json_values.read_mappings(body.get("tools"), "tools"):
        if tool.get("type", "custom") != "custom":
            raise make_request_error(
                f"{path}.type: expected a tool of the client's own, found {tool.get('type')!r:.40}"
            )
        yield json_values.read_tool(tool, "input_schema", path)


def body(reply: Reply, model: str) -> dict[str, Any]:
    """Return the body of a whole reply."""
    text = [{"type": "text", "text": reply.text}] if reply.text or not reply.calls else []
    calls = [{"type": "tool_use", "id": c.id, "name": c.name, "input": dict(c.arguments)} for c in reply.calls]
    usage = {"input_tokens": reply.prompt_tokens, "output_tokens": reply.completion_tokens}
    return _message_head(reply.id, model) | {"content": [*text, *calls], "usage": usage} | _stop_fields(reply)


def opening(reply_id: str, model: str, created: int) -> bytes:
    """Return the first event of a stream, which is sent before the policy has written anything."""
    message = _message_head(reply_id, model) | {"content": [], "usage": {"input_tokens": 0, "output_tokens": 0}}
    return _format_event("message_start", message=message | {"stop_reason": None, "stop_sequence": None})


def remaining_events(reply: Reply, request: Request) -> Iterator[bytes]:
    """Yield the further events of a stream."""
    blocks: list[dict[str, Any]] = body(reply, request.model)["content"]
    for index, block in enumerate(blocks):
        if block["type"] == "text":
            empty = block | {"text": ""}
            deltas = [{"type": "text_delta", "text": piece} for piece in split_for_stream(block["text"])]
        else:
            written = json.dumps(block["input"], ensure_ascii=False)
            empty = block | {"input": {}}
            deltas = [{"type": "input_json_delta", "partial_json": piece} for piece in split_for_stream(written)]
        yield _format_event("content_block_start", index=index, content_block=empty)
        for delta in deltas:
            yield _format_event("content_block_delta", index=index, delta=delta)
        yield _format_event("content_block_stop", index=index)
    usage = {"input_tokens": reply.prompt_tokens, "output_tokens": reply.completion_tokens}
    yield _format_event("message_delta", delta=_stop_fields(reply), usage=usage)
    yield _format_event("message_stop")


def error(problem: ApiError) -> dict[str, Any]:
    """Return the body of a refusal."""
    return {"type": "error", "error": {"type": KINDS[problem.kind], "message": problem.message}}


def error_event(problem: ApiError) -> bytes:
    """Return the last event of a stream that breaks off."""
    return _format_event("error", error=error(problem)["error"])


def _message_head(reply_id: str, model: str) -> dict[str, Any]:
    return {"id": reply_id, "type": "message", "role": "assistant", "model": model}


def _stop_fields(reply: Reply) -> dict[str, Any]:
    reasons = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
    reason = reasons[reply.finish] if reply.stopped_by is None else "stop_sequence"
    return {"stop_reason": reason, "stop_sequence": reply.stopped_by}


def _format_event(kind: str, **data: Any) -> bytes:
    return f"event: {kind}\ndata: ".encode() + json.dumps({"type": kind, **data}).encode() + b"\n\n"
