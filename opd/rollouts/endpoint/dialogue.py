"""How the student reads and writes the messages of a client: through its chat template, or as plain text without one."""

from __future__ import annotations

import json
import secrets
from collections.abc import Sequence
from itertools import groupby
from typing import Any, Protocol

from opd.environments.records import Tool, ToolCall
from opd.interfaces import TurnTokenizer
from opd.prompts.encode import encode_text
from opd.rollouts.endpoint.messages import Call, Message
from opd.rollouts.episodes.chat import ChatAppender, harmless, special_texts, without_tool_role
from opd.rollouts.episodes.tools import CLOSE, OPEN, plain_calls, without_calls, written_calls


class Unreadable(Exception):
    """Messages that the student's chat template refuses."""


class Dialogue(Protocol):
    """What a session needs to know of the student's language."""

    def whole(self, messages: Sequence[Message], tools: Sequence[Tool]) -> list[int]:
        """Tokens of a conversation, up to where the policy begins its turn. Raises: Unreadable."""
        ...

    def after(self, turn: Sequence[int], messages: Sequence[Message], tools: Sequence[Tool]) -> list[int]:
        """Tokens of the messages that come after a turn of the policy, up to where its next one begins. Raises: Unreadable."""
        ...

    def text(self, turn: Sequence[int]) -> str:
        """What the policy wrote, without special tokens."""
        ...

    def calls(self, text: str, tools: Sequence[Tool]) -> tuple[str, tuple[Call, ...]]:
        """The text without the calls in it, and the calls. Raises: BadCall if one cannot be read."""
        ...


class ChatMessages:
    """Through the student's chat template."""

    def __init__(self, appender: ChatAppender, tokenizer: TurnTokenizer, stops: frozenset[int]) -> None:
        self._appender, self._tokenizer, self._stops = appender, tokenizer, stops

    def whole(self, messages: Sequence[Message], tools: Sequence[Tool]) -> list[int]:
        from jinja2 import TemplateError

        told = self._in_template(messages)
        try:
            return self._appender.first([self._appender.safe(message) for message in told], tools)
        except (TemplateError, ValueError, TypeError) as error:
            raise Unreadable(str(error)) from None

    def after(self, turn: Sequence[int], messages: Sequence[Message], tools: Sequence[Tool]) -> list[int]:
        from jinja2 import TemplateError

        ended = bool(turn) and turn[-1] in self._stops
        try:
            return self._appender.after([m.for_template() for m in messages], ended=ended, tools=tools)
        except (TemplateError, ValueError, TypeError) as error:  # an error of ours about the template is a ValueError
            raise Unreadable(str(error)) from None

    def text(self, turn: Sequence[int]) -> str:
        return self._tokenizer.decode(turn, skip_special_tokens=True)

    def calls(self, text: str, tools: Sequence[Tool]) -> tuple[str, tuple[Call, ...]]:
        found = written_calls(text) if tools else ()
        return (without_calls(text) if found else text), _named(found)

    def _in_template(self, messages: Sequence[Message]) -> list[dict[str, Any]]:
        """A whole conversation in roles that the template knows: some have no tools."""
        told = [message.for_template() for message in messages]
        if self._appender.tools_in_template:
            return told
        runs = groupby(map(_with_calls_in_text, told), key=lambda message: message["role"] == "tool")
        return [message for are_results, run in runs for message in (without_tool_role([*run]) if are_results else run)]


class PlainMessages:
    """For a student without a chat template: the texts of all messages one after the other, as the agent words them."""

    def __init__(self, tokenizer: TurnTokenizer) -> None:
        self._tokenizer = tokenizer
        self._special = special_texts(tokenizer)

    def whole(self, messages: Sequence[Message], tools: Sequence[Tool]) -> list[int]:
        calls = ((f"{call.name} {json.dumps(call.arguments, default=dict)}" for call in m.calls) for m in messages)
        texts = "".join(m.text + "".join(made) for m, made in zip(messages, calls, strict=True))
        try:
            return encode_text(self._tokenizer, harmless(texts, self._special)) if texts else []
        except (ValueError, TypeError) as error:  # a lone surrogate is no text
            raise Unreadable(str(error)) from None

    def after(self, turn: Sequence[int], messages: Sequence[Message], tools: Sequence[Tool]) -> list[int]:
        return self.whole(messages, tools)

    def text(self, turn: Sequence[int]) -> str:
        return self._tokenizer.decode(turn, skip_special_tokens=True)

    def calls(self, text: str, tools: Sequence[Tool]) -> tuple[str, tuple[Call, ...]]:
        found = plain_calls(text, tools)
        return ("" if found else text), _named(found)


def _named(calls: Sequence[ToolCall]) -> tuple[Call, ...]:
    """Calls with ids of nine letters and digits, which is what the strictest chat templates take."""
    return tuple(Call(id=secrets.token_hex(5)[:9], name=call.name, arguments=call.arguments) for call in calls)


def _with_calls_in_text(message: dict[str, Any]) -> dict[str, Any]:
    """The message with its calls as the policy writes them."""
    functions = [call["function"] for call in message.get("tool_calls", ())]
    calls = [f"{OPEN}\n{json.dumps(function)}\n{CLOSE}" for function in functions]
    return {"role": message["role"], "content": "\n".join([message["content"], *calls]).lstrip("\n")}
