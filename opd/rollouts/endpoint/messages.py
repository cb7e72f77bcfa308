"""The one form of chat requests and replies in which sessions work. The wire formats convert requests to it, and replies from it."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from hashlib import sha256
from typing import Any, Literal

from opd.records.environments import Tool

Role = Literal["system", "user", "assistant", "tool"]
Finish = Literal["stop", "length", "tool_calls"]
"""Reason why a reply ended: an end token or a stop string, a token limit, or calls of tools."""


Problem = Literal["invalid", "context", "authentication", "permission", "not_found", "too_large", "engine"]


class ApiError(Exception):
    """The refusal of a request. Each wire format writes it in the form of its API."""

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
    """Id by which the tool's result names the call; made by the endpoint in a reply, and by the client in a request."""
    name: str
    arguments: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """One message of a conversation."""

    role: Role
    text: str = ""
    calls: tuple[Call, ...] = ()
    """Only in messages of the assistant."""
    answers: str = ""
    """Only in messages of a tool: the id of the call whose result this is."""

    @property
    def key(self) -> str:
        """A text that is equal for two messages if they count as the same.

        A client may change a message that it was sent before it sends it back: white space around the text may be gone, the arguments
        of a call may have their keys in another order, and some clients give calls ids of their own.
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
    """The model's name that the client gave, whatever it is; the reply repeats it."""
    messages: tuple[Message, ...]
    tools: tuple[Tool, ...] = ()
    max_tokens: int | None = None
    """The client's limit of the reply, which may only lower the training's; None: it gave none."""
    stop: tuple[str, ...] = ()
    stream: bool = False
    stream_usage: bool = False
    """True if a stream in OpenAI's form is to end with the numbers of tokens."""
    overridden: tuple[str, ...] = ()
    """Names of settings that the client gave although the training decides them."""
    identity: str
    """Hash that is equal for two requests if they differ at most in the settings of a stream: then the second is a retry."""

    @property
    def context(self) -> str:
        """A text about the tools that is equal for two requests if one can continue the other's conversation."""
        return canonical_json([tool.schema() for tool in self.tools])


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """The policy's answer to a request."""

    id: str
    """Unique in the session; the reply to a retry has the same."""
    text: str
    """The text for the client: without calls and end tokens, and cut before a stop string."""
    calls: tuple[Call, ...] = ()
    finish: Finish
    stopped_by: str | None = None
    """The stop string at which the reply was cut; None: it was not cut."""
    prompt_tokens: int
    completion_tokens: int
    created: int
    """Seconds since 1970."""

    @property
    def message(self) -> Message:
        """The reply as a message, as the client will send it back."""
        return Message(role="assistant", text=self.text, calls=self.calls)


def canonical_json(value: Any) -> str:
    """Return JSON with sorted keys: equal for equal values."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), default=dict)


def request_hash(body: Mapping[str, Any]) -> str:
    """Return the hash of a request's body, without the settings that only decide whether the reply is streamed."""
    settings = {key: value for key, value in body.items() if key not in ("stream", "stream_options")}
    return sha256(canonical_json(settings).encode("utf-8", "surrogatepass")).hexdigest()


def conversation_digests(context: str, messages: Iterable[Message]) -> Iterator[str]:
    """Yield, for each message, a digest of the conversation up to and with it."""
    digest = sha256(context.encode("utf-8", "surrogatepass")).hexdigest()
    for message in messages:
        digest = sha256(f"{digest}{message.key}".encode("utf-8", "surrogatepass")).hexdigest()
        yield digest


def list_other_keys(body: Mapping[str, Any], names: Iterable[str]) -> tuple[str, ...]:
    """Return the keys of the body that have a value and are not in `names`: at most 40 of them, each cut to 40 characters."""
    return tuple(sorted(key[:40] for key, value in body.items() if key not in names and value is not None)[:40])


def split_for_stream(text: str) -> Iterable[str]:
    """Split a reply's text into the parts in which a stream sends it. There are at most about 64, since a loop that writes them may not get
    to other work between."""
    size = max(64, len(text) // 64)
    return (text[start : start + size] for start in range(0, len(text), size))
