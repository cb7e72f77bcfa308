"""Convert a client's messages to the student's tokens and back: through its chat template, or as plain text if it has none."""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import groupby
from typing import Any

from opd.prompts.encode import encode_prompt, encode_text
from opd.prompts.untrusted_text import escape_specials, special_texts
from opd.records.environments import Tool, ToolCall
from opd.rollouts.decoding import TurnTokenizer, end_ids, written_text
from opd.rollouts.endpoint.messages import Call, Message
from opd.rollouts.episodes.chat import CALL_ID, ChatAppender, make_call_id, without_tool_role
from opd.rollouts.episodes.tools import read_plain_calls
from opd.rollouts.episodes.turns import History


class UnreadableMessages(Exception):
    """Messages that the student's chat template refuses."""


@contextmanager
def _explain_refusal() -> Iterator[None]:
    """Raise UnreadableMessages for what a chat template or a tokenizer raises in this context. An error of ours about the template is a
    ValueError, and so is that of a lone surrogate, which cannot be encoded."""
    from jinja2 import TemplateError

    try:
        yield
    except (TemplateError, ValueError, TypeError) as error:
        raise UnreadableMessages(str(error)) from None


class ChatMessages:
    """Messages that are rendered by the student's chat template."""

    def __init__(self, appender: ChatAppender, stops: frozenset[int]) -> None:
        self._appender, self._stops = appender, stops

    def encode_conversation(self, messages: Sequence[Message], tools: Sequence[Tool]) -> list[int]:
        """Return the tokens of a whole conversation, up to the place where the policy writes. Raises: UnreadableMessages."""
        with _explain_refusal():
            return self._appender.encode_opening(self._make_template_messages(messages), tools)

    def encode_following(self, turn: Sequence[int], messages: Sequence[Message], tools: Sequence[Tool]) -> list[int]:
        """Return the tokens of the messages after a turn of the policy, up to the place where it writes the next one. Raises:
        UnreadableMessages."""
        ended = bool(turn) and turn[-1] in self._stops
        with _explain_refusal():
            template_messages = [message.for_template() for message in messages]
            return self._appender.encode_following(template_messages, ended=ended, tools=tools, turn=self.text(turn))

    def encode_history(self, history: History, messages: Sequence[Message]) -> list[int]:
        """Return the tokens of the history as the policy reads it once these messages follow: a chat template may then leave out earlier
        thoughts. Raises: UnreadableMessages."""
        roles = {message.role for message in messages}
        if not any(self._appender.drops_thoughts_of(turn, roles) for turn, _ in history.turns):
            return history.ids
        if self._appender.drops_thoughts_of(history.head, roles):
            raise UnreadableMessages("thoughts that the chat template leaves out, in turns that were rendered")
        with _explain_refusal():
            return history.without_thoughts(self._appender).ids

    def text(self, turn: Sequence[int]) -> str:
        """Return the text of what the policy wrote, without the tokens that end a turn."""
        return self._appender.turn_text(turn)

    def calls(self, text: str, tools: Sequence[Tool]) -> tuple[str, tuple[Call, ...]]:
        """Return the text without the calls in it, and the calls. Raises: BadCall if one cannot be read."""
        turn = self._appender.read(text, tools)
        return turn.text, _assign_call_ids(turn.calls)

    def _make_template_messages(self, messages: Sequence[Message]) -> list[dict[str, Any]]:
        """Return a whole conversation as the template takes it: some templates have no tools, some take one call in a turn only."""
        template_messages = [
            self._appender.make_message_safe(message.for_template())
            for message in renumber_calls(messages, self._appender.call_ids)
        ]
        if self._appender.tools_in_template:
            return template_messages if self._appender.parallel else _split_parallel_calls(template_messages)
        runs = groupby(map(self._with_calls_in_text, template_messages), key=lambda message: message["role"] == "tool")
        return [message for are_results, run in runs for message in (without_tool_role([*run]) if are_results else run)]

    def _with_calls_in_text(self, message: dict[str, Any]) -> dict[str, Any]:
        """Return the message with its calls in its text, as the policy writes them."""
        functions = [call["function"] for call in message.get("tool_calls", ())]
        if not functions:
            return message
        written = self._appender.format.write([ToolCall(**function) for function in functions])
        return {"role": message["role"], "content": f"{message['content']}\n{written}".lstrip("\n")}


class PlainMessages:
    """Messages for a student without a chat template: their texts one after the other as they are, with an end token after each message of
    the policy. Only turns that are rendered again get that token here; in the others the policy has written it itself."""

    def __init__(self, tokenizer: TurnTokenizer, stop_token_ids: Iterable[int] = (), prompt: str = "") -> None:
        """`stop_token_ids` and the tokenizer's own end token end a turn. `prompt` is the episode's: where a conversation begins with it, its
        special tokens are not broken up."""
        self._tokenizer = tokenizer
        self._ends = end_ids(tokenizer, stop_token_ids)
        self._special = special_texts(tokenizer)
        self._end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
        self._prompt = prompt

    def encode_conversation(self, messages: Sequence[Message], tools: Sequence[Tool]) -> list[int]:
        ids: list[int] = []
        for is_assistant, run in groupby(messages, key=lambda message: message.role == "assistant"):
            if is_assistant:
                for message in run:
                    ids += [
                        *self._encode_text(escape_specials(_join_messages([message]), self._special), at_start=not ids),
                        *self._end,
                    ]
                continue
            text = _join_messages(list(run))
            prompt_prefix = self._prompt if not ids and text.startswith(self._prompt) else ""
            ids += self._encode_text(
                prompt_prefix + escape_specials(text.removeprefix(prompt_prefix), self._special), at_start=not ids
            )
        return ids

    def encode_following(self, turn: Sequence[int], messages: Sequence[Message], tools: Sequence[Tool]) -> list[int]:
        return self._encode_text(escape_specials(_join_messages(messages), self._special), at_start=False)

    def _encode_text(self, text: str, *, at_start: bool) -> list[int]:
        """Return the ids of a text; `at_start`: with the special tokens that the tokenizer puts before a prompt. Raises:
        UnreadableMessages."""
        encode = encode_prompt if at_start else encode_text
        with _explain_refusal():
            return list(encode(self._tokenizer, text)) if text else []

    def encode_history(self, history: History, messages: Sequence[Message]) -> list[int]:
        return history.ids

    def text(self, turn: Sequence[int]) -> str:
        return written_text(self._tokenizer, turn, self._ends)

    def calls(self, text: str, tools: Sequence[Tool]) -> tuple[str, tuple[Call, ...]]:
        tool_calls = read_plain_calls(text, tools)
        return ("" if tool_calls else text), _assign_call_ids(tool_calls)


ClientDialogue = ChatMessages | PlainMessages
"""Conversion between messages and the student's tokens, as far as a session needs it. Both classes have the methods of `ChatMessages`."""


def _join_messages(messages: Sequence[Message]) -> str:
    """Return one text with the texts and calls of all messages, one after the other."""
    calls = ((f"{call.name} {json.dumps(call.arguments, default=dict)}" for call in m.calls) for m in messages)
    return "".join(m.text + "".join(call_texts) for m, call_texts in zip(messages, calls, strict=True))


def _assign_call_ids(calls: Sequence[ToolCall]) -> tuple[Call, ...]:
    """Return the calls with ids of nine letters and digits, which is what the strictest chat templates take."""
    return tuple(Call(id=secrets.token_hex(5)[:9], name=call.name, arguments=call.arguments) for call in calls)


def renumber_calls(messages: Sequence[Message], form: str = CALL_ID) -> list[Message]:
    """Return the conversation with new ids: each turn's calls get numbered ids, and each result the id of its call, whatever ids the client
    gave."""
    conversation: list[Message] = []
    ids: dict[str, str] = {}
    for message in messages:
        if message.calls:
            calls = tuple(replace(call, id=make_call_id(i, call.name, form)) for i, call in enumerate(message.calls))
            ids = {call.id: named.id for call, named in zip(message.calls, calls, strict=True)}
            message = replace(message, calls=calls)
        elif message.role == "tool":
            message = replace(message, answers=ids.get(message.answers, message.answers))
        conversation.append(message)
    return conversation


def _split_parallel_calls(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Split turns with several calls into turns with one call each, and put each result after its call."""
    conversation: list[dict[str, Any]] = []
    later_calls: list[dict[str, Any]] = []
    for message in messages:
        if message["role"] != "tool":
            conversation += later_calls
            calls = message.get("tool_calls", [])
            later_calls = [{"role": "assistant", "content": "", "tool_calls": [call]} for call in calls[1:]]
            conversation.append(message | {"tool_calls": calls[:1]} if calls else message)
            continue
        if conversation and conversation[-1]["role"] == "tool" and later_calls:
            conversation.append(later_calls.pop(0))
        conversation.append(message)
    return conversation + later_calls
