"""A chat request and its reply in one form. The wire formats are read into it and written from it; a session knows no other."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from hashlib import sha256
from typing import Any, Literal

from opd.records.environments import Tool

Role = Literal["system", "user", "assistant", "tool"]
Finish = Literal["stop", "length", "tool_calls"]
"""Why a reply ended: with an end token or a stop string, at a token limit, or with calls of tools."""


Problem = Literal["invalid", "context", "authentication", "permission", "not_found", "too_large", "engine"]


class ApiError(Exception):
    """A request that gets no reply. Each wire format writes it in its API's own words."""

    def __init__(self, status: int, kind: Problem, message: str) -> None:
        super().__init__(message)
        self.status, self.kind, self.message = status, kind, message


def make_request_error(message: str) -> ApiError:
    """Return the error for a request that is wrong in itself, so that sending it again would not help."""
    return ApiError(400, "invalid", message)


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One call of a tool that the policy asks for."""

    id: str
    """Made by the endpoint, so that the tool's result can name the call."""
    name: str
    arguments: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """One message of a conversation."""

    role: Role
    text: str = ""
    calls: tuple[Call, ...] = ()
    """Only of the assistant."""
    answers: str = ""
    """Only of a tool: the id of the call whose result this is."""

    @property
    def key(self) -> str:
        """Text that two messages have in common if they count as the same one.

        A client sends back what it was sent in its own writing: white space around the text may be gone, the arguments of a
        call may have their keys in another order, and some clients give calls ids of their own.
        """
        calls = [[call.name, call.arguments] for call in self.calls]
        return canonical_json([self.role, self.text.strip(), calls])

    def for_template(self) -> dict[str, Any]:
        """Return the message as chat templates read it."""
        message: dict[str, Any] = {"role": self.role, "content": self.text}
        if self.calls:
            message["tool_calls"] = [
                {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": dict(call.arguments)}}
                for call in self.calls
            ]
        if self.role == "tool":
            message["tool_call_id"] = self.answers
        return message


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """A client's request for one turn."""

    model: str
    """Whatever name the client gave; the reply repeats it."""
    messages: tuple[Message, ...]
    tools: tuple[Tool, ...] = ()
    max_tokens: int | None = None
    """The client's limit, which may only lower that of the training."""
    stop: tuple[str, ...] = ()
    stream: bool = False
    stream_usage: bool = False
    """Whether a stream of OpenAI's form ends with the numbers of tokens."""
    overridden: tuple[str, ...] = ()
    """Settings that the client gave and that the training decides."""
    identity: str
    """Equal for two requests if they are the same but for `stream`: then the second is a retry."""

    @property
    def context(self) -> str:
        """Text that two requests have in common, beside the messages, if one can continue the other's conversation."""
        return canonical_json([tool.schema() for tool in self.tools])


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """The policy's answer to a request."""

    id: str
    """Unique in the session; a retry gets the same."""
    text: str
    """What the client reads: without special tokens, calls and what follows a stop string."""
    calls: tuple[Call, ...] = ()
    finish: Finish
    stopped_by: str | None = None
    """The stop string at which the reply was cut."""
    prompt_tokens: int
    completion_tokens: int
    created: int
    """Seconds since 1970."""

    @property
    def message(self) -> Message:
        """The reply as the client will send it back."""
        return Message(role="assistant", text=self.text, calls=self.calls)


def canonical_json(value: Any) -> str:
    """Return JSON with sorted keys: equal for equal values."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), default=dict)


def request_hash(body: Mapping[str, Any]) -> str:
    """Return the hash of a request's body without the settings that decide only how the reply is sent."""
    settings = {key: value for key, value in body.items() if key not in ("stream", "stream_options")}
    return sha256(canonical_json(settings).encode("utf-8", "surrogatepass")).hexdigest()


def conversation_digests(context: str, messages: Iterable[Message]) -> Iterator[str]:
    """Yield a digest of the conversation up to each message."""
    digest = sha256(context.encode("utf-8", "surrogatepass")).hexdigest()
    for message in messages:
        digest = sha256(f"{digest}{message.key}".encode("utf-8", "surrogatepass")).hexdigest()
        yield digest


def list_other_keys(body: Mapping[str, Any], names: Iterable[str]) -> tuple[str, ...]:
    """Return the other keys to which the body gives a value: the first of them, and of each its first characters."""
    return tuple(sorted(key[:40] for key, value in body.items() if key not in names and value is not None)[:40])


def split_for_stream(text: str) -> Iterable[str]:
    """Split the text into the parts in which a stream sends it, not too many: the loop waits for none of them."""
    size = max(64, len(text) // 64)
    return (text[start : start + size] for start in range(0, len(text), size))
