"""OpenAI's chat completions: requests with tools, replies whole and as server-sent events."""

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
    Role,
    list_other_keys,
    make_request_error,
    request_hash,
    split_for_stream,
)

READ = (
    "model", "messages", "tools", "tool_choice", "stop", "max_tokens", "max_completion_tokens", "stream", "stream_options",
    "user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key",
)  # fmt: skip
"""Settings that are followed, or that do not change a reply. All other settings are decided by the training, whatever the client gives."""
OLD = {"functions": "tools", "function_call": "tool_choice"}
"""Settings of OpenAI's first form of tools -> those of today's."""
ROLES: dict[str, Role] = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
}
CODES: dict[Problem, str] = {
    "authentication": "invalid_api_key",
    "context": "context_length_exceeded",
    "permission": "permission_denied",
    "not_found": "not_found",
    "too_large": "request_too_large",
}
WAITING = b": the policy is writing\n\n"
"""A comment, which clients skip; it keeps the connection in use."""


def parse(body: Mapping[str, Any]) -> Request:
    """Read a request. Raises: ApiError."""
    old = next((key for key in OLD if body.get(key) is not None), None)
    if old is not None:
        raise make_request_error(
            f"{old}: a setting of OpenAI's first form of tools, which nobody would read here: give {OLD[old]}"
        )
    choice = body.get("tool_choice")
    stop = body.get("stop")
    stops = [stop] if isinstance(stop, str) else json_values.read_list(stop, "stop")
    limits = [json_values.read_positive_integer(body.get(key), key) for key in ("max_completion_tokens", "max_tokens")]
    options = json_values.read_mapping(body.get("stream_options") or {}, "stream_options")
    forced = () if choice in (None, "auto", "none") else ("tool_choice",)
    return Request(
        model=json_values.read_text(body.get("model", ""), "model"),
        messages=tuple(_parse_messages(body)),
        tools=() if choice == "none" else tuple(_parse_tools(body)),
        max_tokens=min((limit for limit in limits if limit is not None), default=None),
        stop=tuple(json_values.read_text(text, "stop") for text in stops if text != ""),
        stream=bool(body.get("stream")),
        stream_usage=bool(options.get("include_usage")),
        overridden=list_other_keys(body, READ) + forced,
        identity=request_hash(body),
    )


def _parse_messages(body: Mapping[str, Any]) -> Iterator[Message]:
    for path, message in json_values.read_mappings(body.get("messages"), "messages"):
        role = ROLES.get(str(message.get("role")))
        if role is None:
            raise make_request_error(
                f"{path}.role: expected one of {', '.join(ROLES)}, found {message.get('role')!r:.40}"
            )
        unread = next((key for key in ("function_call", "refusal", "audio") if message.get(key) is not None), None)
        if unread is not None:
            raise make_request_error(f"{path}.{unread}: this model reads content and tool_calls")
        calls = json_values.read_list(message.get("tool_calls"), f"{path}.tool_calls") if role == "assistant" else []
        answers = json_values.read_text(message.get("tool_call_id"), f"{path}.tool_call_id") if role == "tool" else ""
        yield Message(
            role=role,
            text=json_values.read_content(message.get("content"), f"{path}.content"),
            calls=tuple(_parse_call(call, f"{path}.tool_calls[{index}]") for index, call in enumerate(calls)),
            answers=answers,
        )


def _parse_call(data: Any, path: str) -> Call:
    call = json_values.read_mapping(data, path)
    function = json_values.read_mapping(call.get("function"), f"{path}.function")
    return Call(
        id=json_values.read_text(call.get("id"), f"{path}.id"),
        name=json_values.read_text(function.get("name"), f"{path}.function.name"),
        arguments=json_values.read_arguments(function.get("arguments"), f"{path}.function.arguments"),
    )


def _parse_tools(body: Mapping[str, Any]) -> Iterator[Tool]:
    for path, tool in json_values.read_mappings(body.get("tools"), "tools"):
        if tool.get("type") != "function":
            raise make_request_error(f"{path}.type: expected function, found {tool.get('type')!r:.40}")
        function = json_values.read_mapping(tool.get("function"), f"{path}.function")
        yield json_values.read_tool(function, "parameters", f"{path}.function")


def body(reply: Reply, model: str) -> dict[str, Any]:
    """Return the body of a whole reply."""
    message: dict[str, Any] = {"role": "assistant", "content": reply.text or None if reply.calls else reply.text}
    if reply.calls:
        message["tool_calls"] = [_call_body(call) for call in reply.calls]
    choice = {"index": 0, "message": message, "finish_reason": reply.finish, "logprobs": None}
    return _completion_head(reply, model, "chat.completion") | {"choices": [choice], "usage": _count_usage(reply)}


def opening(reply_id: str, model: str, created: int) -> bytes:
    """Return the first event of a stream, which is sent before the policy has written anything."""
    return _format_event(_format_chunk(reply_id, model, created, {"role": "assistant", "content": ""}, None))


def remaining_events(reply: Reply, request: Request) -> Iterator[bytes]:
    """Yield the further events of a stream."""
    head_fields = (reply.id, request.model, reply.created)
    for piece in split_for_stream(reply.text):
        yield _format_event(_format_chunk(*head_fields, {"content": piece}, None))
    for index, call in enumerate(reply.calls):
        entry = {"index": index, **_call_body(call)}
        named = entry | {"function": {"name": call.name, "arguments": ""}}
        yield _format_event(_format_chunk(*head_fields, {"tool_calls": [named]}, None))
        for piece in split_for_stream(entry["function"]["arguments"]):
            yield _format_event(
                _format_chunk(*head_fields, {"tool_calls": [{"index": index, "function": {"arguments": piece}}]}, None)
            )
    yield _format_event(_format_chunk(*head_fields, {}, reply.finish))
    if request.stream_usage:
        head = _completion_head(reply, request.model, "chat.completion.chunk")
        yield _format_event(head | {"choices": [], "usage": _count_usage(reply)})
    yield b"data: [DONE]\n\n"


def error(problem: ApiError) -> dict[str, Any]:
    """Return the body of a refusal."""
    kind = "invalid_request_error" if problem.status < 500 else "server_error"
    return {"error": {"message": problem.message, "type": kind, "param": None, "code": CODES.get(problem.kind)}}


def error_event(problem: ApiError) -> bytes:
    """Return the last event of a stream that breaks off."""
    return _format_event(error(problem))


def _completion_head(reply: Reply, model: str, kind: str) -> dict[str, Any]:
    return {"id": reply.id, "object": kind, "created": reply.created, "model": model}


def _format_chunk(
    reply_id: str, model: str, created: int, delta: Mapping[str, Any], finish: str | None
) -> dict[str, Any]:
    choice = {"index": 0, "delta": delta, "finish_reason": finish, "logprobs": None}
    return {"id": reply_id, "object": "chat.completion.chunk", "created": created, "model": model, "choices": [choice]}


def _call_body(call: Call) -> dict[str, Any]:
    written = json.dumps(dict(call.arguments), ensure_ascii=False)
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": written}}


def _count_usage(reply: Reply) -> dict[str, int]:
    prompt_tokens, completion_tokens = reply.prompt_tokens, reply.completion_tokens
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
    }


def _format_event(data: Mapping[str, Any]) -> bytes:
    return b"data: " + json.dumps(data).encode() + b"\n\n"
