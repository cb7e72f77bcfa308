"""Messages of a client as the student reads and writes them: through its chat template, or as plain text without one."""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import groupby
from typing import Any, Protocol

from opd.prompts.encode import encode_prompt, encode_text
from opd.prompts.harmless import escape_specials, special_texts
from opd.records.environments import Tool, ToolCall
from opd.rollouts.decoding import end_ids, written_text
from opd.rollouts.endpoint.messages import Call, Message
from opd.rollouts.episodes.chat import ChatAppender, call_id, without_tool_role
from opd.rollouts.episodes.tokenizer import TurnTokenizer
from opd.rollouts.episodes.tools import plain_calls
from opd.rollouts.episodes.turns import History


class UnreadableMessages(Exception):
    """Messages that the student's chat template refuses."""


class ClientDialogue(Protocol):
    """The student's language, as far as a session needs it."""

    def whole(self, messages: Sequence[Message], tools: Sequence[Tool]) -> list[int]:
        """Return the tokens of a conversation, up to where the policy begins its turn. Raises:
        UnreadableMessages."""
        ...

    def after(self, turn: Sequence[int], messages: Sequence[Message], tools: Sequence[Tool]) -> list[int]:
        """Return the tokens of the messages that come after a turn of the policy, up to where its next one begins. Raises:
        UnreadableMessages."""
        ...

    def before(self, history: History, messages: Sequence[Message]) -> list[int]:
        """Return the tokens of what was written so far, as the policy reads them when these messages follow. Raises:
        UnreadableMessages."""
        ...

    def text(self, turn: Sequence[int]) -> str:
        """Return the text of what the policy wrote, without the tokens that end a turn."""
        ...

    def calls(self, text: str, tools: Sequence[Tool]) -> tuple[str, tuple[Call, ...]]:
        """Return the text without the calls in it, and the calls. Raises: BadCall if one cannot be read."""
        ...


class ChatMessages:
    """Through the student's chat template."""

    def __init__(self, appender: ChatAppender, stops: frozenset[int]) -> None:
        self._appender, self._stops = appender, stops

    def whole(self, messages: Sequence[Message], tools: Sequence[Tool]) -> list[int]:
        from jinja2 import TemplateError

        try:
            return self._appender.encode_opening(self._in_template(messages), tools)
        except (TemplateError, ValueError, TypeError) as error:
            raise UnreadableMessages(str(error)) from None

    def after(self, turn: Sequence[int], messages: Sequence[Message], tools: Sequence[Tool]) -> list[int]:
        from jinja2 import TemplateError

        ended = bool(turn) and turn[-1] in self._stops
        try:
            return self._appender.encode_following([m.for_template() for m in messages], ended=ended, tools=tools)
        except (TemplateError, ValueError, TypeError) as error:  # an error of ours about the template is a ValueError
            raise UnreadableMessages(str(error)) from None

    def before(self, history: History, messages: Sequence[Message]) -> list[int]:
        from jinja2 import TemplateError

        roles = {message.role for message in messages}
        if not any(self._appender.drops(turn, roles) for turn, _ in history.turns):
            return history.ids
        if self._appender.drops(history.head, roles):
            raise UnreadableMessages("thoughts that the chat template leaves out, in turns that were rendered")
        try:
            return history.without_thoughts(self._appender).ids
        except (TemplateError, ValueError, TypeError) as error:
            raise UnreadableMessages(str(error)) from None

    def text(self, turn: Sequence[int]) -> str:
        return self._appender.turn_text(turn)

    def calls(self, text: str, tools: Sequence[Tool]) -> tuple[str, tuple[Call, ...]]:
        found = self._appender.read(text, tools)
        return found.text, _assign_call_ids(found.calls)

    def _in_template(self, messages: Sequence[Message]) -> list[dict[str, Any]]:
        """Return a whole conversation as the template takes it: some know no tools, some one call in a turn."""
        told = [self._appender.make_message_safe(message.for_template()) for message in with_own_ids(messages)]
        if self._appender.tools_in_template:
            return told if self._appender.parallel else _one_by_one(told)
        runs = groupby(map(self._with_calls_in_text, told), key=lambda message: message["role"] == "tool")
        return [message for are_results, run in runs for message in (without_tool_role([*run]) if are_results else run)]

    def _with_calls_in_text(self, message: dict[str, Any]) -> dict[str, Any]:
        """Return the message with its calls as the policy writes them."""
        functions = [call["function"] for call in message.get("tool_calls", ())]
        if not functions:
            return message
        written = self._appender.format.write([ToolCall(**function) for function in functions])
        return {"role": message["role"], "content": f"{message['content']}\n{written}".lstrip("\n")}


class PlainMessages:
    """For a student without a chat template: the texts of all messages one after the other, as the agent words them, and an end
    token after each of the policy, which it writes itself where its turn is not rendered anew."""

    def __init__(self, tokenizer: TurnTokenizer, stop_token_ids: Iterable[int] = (), prompt: str = "") -> None:
        """`stop_token_ids` end a turn, beside the tokenizer's own end token. `prompt` is the episode's, which may have special tokens:
        where a conversation begins with it, they stay."""
        self._tokenizer = tokenizer
        self._ends = end_ids(tokenizer, stop_token_ids)
        self._special = special_texts(tokenizer)
        self._end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
        self._prompt = prompt

    def whole(self, messages: Sequence[Message], tools: Sequence[Tool]) -> list[int]:
        ids: list[int] = []
        for theirs, run in groupby(messages, key=lambda message: message.role == "assistant"):
            if theirs:
                for message in run:
                    ids += [
                        *self._encode_text(escape_specials(_side_by_side([message]), self._special), first=not ids),
                        *self._end,
                    ]
                continue
            text = _side_by_side(list(run))
            kept = self._prompt if not ids and text.startswith(self._prompt) else ""
            ids += self._encode_text(kept + escape_specials(text.removeprefix(kept), self._special), first=not ids)
        return ids

    def after(self, turn: Sequence[int], messages: Sequence[Message], tools: Sequence[Tool]) -> list[int]:
        return self._encode_text(escape_specials(_side_by_side(messages), self._special), first=False)

    def _encode_text(self, text: str, *, first: bool) -> list[int]:
        """Return the ids of a text; the `first` one has in front what the tokenizer puts there."""
        encode = encode_prompt if first else encode_text
        try:
            return list(encode(self._tokenizer, text)) if text else []
        except (ValueError, TypeError) as error:  # a lone surrogate is no text
            raise UnreadableMessages(str(error)) from None

    def before(self, history: History, messages: Sequence[Message]) -> list[int]:
        return history.ids

    def text(self, turn: Sequence[int]) -> str:
        return written_text(self._tokenizer, turn, self._ends)

    def calls(self, text: str, tools: Sequence[Tool]) -> tuple[str, tuple[Call, ...]]:
        found = plain_calls(text, tools)
        return ("" if found else text), _assign_call_ids(found)


def _side_by_side(messages: Sequence[Message]) -> str:
    """Return the texts of messages with their calls, one after the other."""
    calls = ((f"{call.name} {json.dumps(call.arguments, default=dict)}" for call in m.calls) for m in messages)
    return "".join(m.text + "".join(made) for m, made in zip(messages, calls, strict=True))


def _assign_call_ids(calls: Sequence[ToolCall]) -> tuple[Call, ...]:
    """Return the calls with ids of nine letters and digits, which is what the strictest chat templates take."""
    return tuple(Call(id=secrets.token_hex(5)[:9], name=call.name, arguments=call.arguments) for call in calls)


def with_own_ids(messages: Sequence[Message]) -> list[Message]:
    """Return the conversation with calls numbered in each turn, and results with the numbers of their calls, whatever ids a
    client gave."""
    found: list[Message] = []
    ids: dict[str, str] = {}
    for message in messages:
        if message.calls:
            ids = {call.id: call_id(place) for place, call in enumerate(message.calls)}
            calls = tuple(replace(call, id=call_id(place)) for place, call in enumerate(message.calls))
            message = replace(message, calls=calls)
        elif message.role == "tool":
            message = replace(message, answers=ids.get(message.answers, message.answers))
        found.append(message)
    return found


def _one_by_one(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Split turns with several calls into turns with one call, each followed by its result."""
    found: list[dict[str, Any]] = []
    waiting: list[dict[str, Any]] = []
    for message in messages:
        if message["role"] != "tool":
            found += waiting
            calls = message.get("tool_calls", [])
            waiting = [{"role": "assistant", "content": "", "tool_calls": [call]} for call in calls[1:]]
            found.append(message | {"tool_calls": calls[:1]} if calls else message)
            continue
        if found and found[-1]["role"] == "tool" and waiting:
            found.append(waiting.pop(0))
        found.append(message)
    return found + waiting
