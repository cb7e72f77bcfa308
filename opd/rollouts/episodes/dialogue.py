"""Two ways to hold a dialogue in tokens: chat messages through the student's template, and plain text.

An episode whose prompt is messages has the first, one whose prompt is text the second.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from opd.prompts.conversation import Messages
from opd.prompts.encode import encode_prompt, encode_text
from opd.prompts.untrusted_text import escape_specials, special_texts
from opd.records.environments import Tool, ToolCall
from opd.rollouts.decoding import TurnTokenizer, end_ids, written_text
from opd.rollouts.episodes.chat import ChatAppender
from opd.rollouts.episodes.tools import check_calls, read_plain_calls
from opd.text import find_control_character

Observation = str | tuple[str, ...]
MAX_OBSERVATION = 1 << 18
"""Longest observation in characters. A longer one would not fit any context, and would only cost the tokenizer's time."""


class BadObservation(Exception):
    """An observation that no policy can read."""


class PlainDialogue:
    """A dialogue whose texts stand one after the other as they are: prompt, observation, turn, observation, turn."""

    def __init__(self, tokenizer: TurnTokenizer, tools: Sequence[Tool], stop_token_ids: Iterable[int] = ()) -> None:
        """`stop_token_ids` and the tokenizer's own end token end a turn."""
        self._tokenizer = tokenizer
        self._ends = end_ids(tokenizer, stop_token_ids)
        self._tools = tools
        self._special = special_texts(tokenizer)

    def encode_opening(self, prompt: str | Messages, observation: str | Messages, note: str = "") -> list[int]:
        """Return the token ids of the prompt, the first observation and last `note`, up to the place where the policy writes.
        Raises: BadObservation, and what a chat template raises."""
        assert isinstance(prompt, str)
        if not isinstance(observation, str):
            raise BadObservation("messages after a prompt that is text")
        return list(encode_prompt(self._tokenizer, prompt + self._join_safely(observation, note)))

    def text(self, token_ids: Sequence[int]) -> str:
        """Return the text of a turn, without the tokens that end it."""
        return written_text(self._tokenizer, token_ids, self._ends)

    def calls(self, text: str) -> tuple[ToolCall, ...]:
        """Return the tool calls in a turn's text. Raises: BadCall."""
        return read_plain_calls(text, self._tools)

    def encode_following(
        self, observation: Observation, *, calls: int, ended: bool, note: str = "", turn: str = ""
    ) -> list[int]:
        """Return the token ids that follow a turn with so many calls: the observation, and last `note`. `ended` and `turn` are
        explained at `ChatAppender.encode_following`. Raises: as `encode_opening`."""
        texts = (*((observation,) if isinstance(observation, str) else observation), note)
        return encode_text(self._tokenizer, self._join_safely(*texts)) if any(texts) else []

    def drops_thoughts(self, *, calls: int, noted: bool = False) -> bool:
        """Return True if, once a turn with so many calls is answered, the policy reads all earlier turns without their thoughts. `noted`
        says that a note comes with the answer, as before a summary."""
        return False

    def without_thoughts(self, turn: Sequence[int]) -> list[int]:
        """Return the token ids of a turn as the policy reads it without its thoughts. Raises: what a chat template raises."""
        return list(turn)

    def _join_safely(self, *texts: str) -> str:
        """Join the texts, and break up special tokens in the result: halves of one may come from two texts. Raises: BadObservation."""
        return escape_specials("".join(map(check_observation, texts)), self._special)


class ChatDialogue:
    """A dialogue of messages, rendered by the student's chat template."""

    def __init__(self, appender: ChatAppender, tools: Sequence[Tool]) -> None:
        self._appender = appender
        self._tools = tools

    def encode_opening(self, prompt: str | Messages, observation: str | Messages, note: str = "") -> list[int]:
        assert not isinstance(prompt, str)
        messages = [self._appender.make_message_safe(message) for message in prompt]
        if not isinstance(observation, str):
            messages += [
                self._appender.make_message_safe(m | {"content": check_observation(m["content"])}) for m in observation
            ]
        else:
            self._add_user_text(messages, observation)
        self._add_user_text(messages, note)
        try:
            return self._appender.encode_opening(messages, self._tools)
        except (TypeError, ValueError) as error:
            # The messages of an environment's `reset` may have any keys, and the template may read them in any way.
            raise BadObservation(f"the chat template cannot read the messages: {error}") from None

    def _add_user_text(self, messages: list[dict[str, Any]], text: str) -> None:
        """Add a text in the role `user`: to the last message if that is a user's, since some templates refuse two in a row."""
        if text and messages[-1]["role"] == "user":
            messages[-1]["content"] += f"\n\n{self._make_safe(text)}"
        elif text:
            messages.append({"role": "user", "content": self._make_safe(text)})

    def text(self, token_ids: Sequence[int]) -> str:
        return self._appender.turn_text(token_ids)

    def calls(self, text: str) -> tuple[ToolCall, ...]:
        return check_calls(self._appender.read(text, self._tools).calls, self._tools)

    def encode_following(
        self, observation: Observation, *, calls: int, ended: bool, note: str = "", turn: str = ""
    ) -> list[int]:
        texts = (observation,) if isinstance(observation, str) else observation
        role = "tool" if calls else "user"
        messages: list[dict[str, Any]] = [{"role": role, "content": check_observation(text)} for text in texts]
        # Some templates refuse two messages of a user in a row.
        if note and messages and role == "user":
            messages[-1]["content"] += f"\n\n{note}"
            note = ""
        return self._appender.encode_following(messages, ended=ended, tools=self._tools, note=note, turn=turn)

    def drops_thoughts(self, *, calls: int, noted: bool = False) -> bool:
        return self._appender.drops_thoughts(calls=calls, noted=noted)

    def without_thoughts(self, turn: Sequence[int]) -> list[int]:
        return self._appender.without_thoughts(turn)

    def _make_safe(self, text: str) -> str:
        return self._appender.break_special_tokens(check_observation(text))


Dialogue = PlainDialogue | ChatDialogue
"""Conversion of an episode's texts into tokens, and of its turns into calls. Both classes have the methods of `PlainDialogue`."""


def check_observation(text: str) -> str:
    """Return an environment's text unchanged. Raises: BadObservation if it is too long, or has control characters."""
    if len(text) > MAX_OBSERVATION:
        raise BadObservation(f"{len(text):,} characters, at most {MAX_OBSERVATION:,} can be read")
    if (odd := find_control_character(text)) is not None:
        raise BadObservation(f"the control character {odd[0]!r} at place {odd.start()}")
    return text
