"""Two ways to hold a dialogue in tokens: chat messages through the student's template, and plain text.

Which one an episode has depends on its prompt: messages or text.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence
from typing import Protocol

from opd.environments.records import Tool, ToolCall
from opd.interfaces import TurnTokenizer
from opd.prompts.encode import encode_text
from opd.prompts.line import Messages
from opd.rollouts.episodes.chat import ChatAppender, harmless, special_texts
from opd.rollouts.episodes.tools import plain_calls, tagged_calls

Observation = str | tuple[str, ...]
MAX_OBSERVATION = 1 << 18
"""Characters of one observation. More would not fit any context and only cost the tokenizer's time."""
_LAYOUT = "\n\t\r"
"""Control characters that belong to text."""


class BadObservation(Exception):
    """An observation that no policy can read."""


class Dialogue(Protocol):
    """How an episode's texts become tokens, and its turns become calls."""

    def first(self, prompt: str | Messages, observation: str | Messages) -> list[int]:
        """Token ids of the prompt and the first observation, up to where the policy writes. Raises: BadObservation, and what
        a chat template raises."""
        ...

    def calls(self, text: str) -> tuple[ToolCall, ...]:
        """The tool calls in a turn's text. Raises: BadCall."""
        ...

    def after(self, observation: Observation, *, calls: int, ended: bool) -> list[int]:
        """Token ids that follow a turn with so many calls; `ended` is explained at `ChatAppender.after`. Raises: as `first`."""
        ...


class PlainDialogue:
    """Texts one after the other, as the environment words them: prompt, observation, turn, observation, turn."""

    def __init__(self, tokenizer: TurnTokenizer, tools: Sequence[Tool]) -> None:
        self._tokenizer = tokenizer
        self._tools = tools
        self._special = special_texts(tokenizer)

    def first(self, prompt: str | Messages, observation: str | Messages) -> list[int]:
        assert isinstance(prompt, str)
        if not isinstance(observation, str):
            raise BadObservation("messages after a prompt that is text")
        return encode_text(self._tokenizer, prompt + self._safe(observation))

    def calls(self, text: str) -> tuple[ToolCall, ...]:
        return plain_calls(text, self._tools)

    def after(self, observation: Observation, *, calls: int, ended: bool) -> list[int]:
        texts = (observation,) if isinstance(observation, str) else observation
        return encode_text(self._tokenizer, "".join(map(self._safe, texts))) if any(texts) else []

    def _safe(self, text: str) -> str:
        return harmless(checked(text), self._special)


class ChatDialogue:
    """Messages through the student's chat template."""

    def __init__(self, appender: ChatAppender, tools: Sequence[Tool]) -> None:
        self._appender = appender
        self._tools = tools

    def first(self, prompt: str | Messages, observation: str | Messages) -> list[int]:
        assert not isinstance(prompt, str)
        given = [dict(message) for message in prompt]
        if not isinstance(observation, str):
            given += [m | {"content": self._safe(m["content"])} for m in observation]
        elif observation and given[-1]["role"] == "user":  # some templates refuse two messages of a user in a row
            given[-1]["content"] += f"\n\n{self._safe(observation)}"
        elif observation:
            given.append({"role": "user", "content": self._safe(observation)})
        return self._appender.first(given, self._tools)

    def calls(self, text: str) -> tuple[ToolCall, ...]:
        return tagged_calls(text, self._tools) if self._tools else ()

    def after(self, observation: Observation, *, calls: int, ended: bool) -> list[int]:
        texts = (observation,) if isinstance(observation, str) else observation
        role = "tool" if calls else "user"
        messages = [{"role": role, "content": checked(text)} for text in texts]
        return self._appender.after(messages, ended=ended, tools=self._tools)

    def _safe(self, text: str) -> str:
        return self._appender.harmless(checked(text))


def checked(text: str) -> str:
    """An environment's text as it is. Raises: BadObservation if it is too long, or has characters that are no text."""
    if len(text) > MAX_OBSERVATION:
        raise BadObservation(f"{len(text):,} characters, at most {MAX_OBSERVATION:,} can be read")
    odd = next((c for c in text if c not in _LAYOUT and unicodedata.category(c) in ("Cc", "Cs")), None)
    if odd is not None:
        raise BadObservation(f"the control character {odd!r} at place {text.index(odd)}")
    return text
