"""The pieces between which the turns of an episode stand: the opening, the answers, and the history that they make up as tokens."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from opd.rollouts.episodes.chat import ChatAppender
from opd.rollouts.episodes.dialogue import Dialogue

if TYPE_CHECKING:
    from opd.prompts.conversation import Messages


@dataclass(slots=True)
class History:
    """The tokens of a dialogue up to its next turn, in pieces."""

    head: list[int]
    """Tokens before the first turn: prompt and first observation, or a summary."""
    turns: list[tuple[list[int], list[int]]] = field(default_factory=list)
    """The tokens of each turn, and the tokens between it and the next turn."""

    @property
    def ids(self) -> list[int]:
        """All tokens of the history, in order."""
        return self.head + [token for turn, following in self.turns for token in (*turn, *following)]

    def with_last(self, following: list[int]) -> History:
        """Return the same history, but with `following` after the last turn."""
        return History(self.head, [*self.turns[:-1], (self.turns[-1][0], following)])

    def without_thoughts(self, dialogue: Dialogue | ChatAppender) -> History:
        """Return the history without the thoughts in its turns, which some chat templates leave out. Raises: what a chat template
        raises."""
        return History(self.head, [(dialogue.without_thoughts(turn), following) for turn, following in self.turns])


@dataclass(frozen=True, slots=True)
class Opening:
    """The beginning of an episode: its prompt and the first observation."""

    dialogue: Dialogue
    prompt: str | Messages
    observation: str | Messages

    @property
    def texts(self) -> list[str]:
        """The texts of the first observation."""
        observation = self.observation
        return [observation] if isinstance(observation, str) else [message["content"] for message in observation]

    def ids(self, note: str = "") -> list[int]:
        """Return the token ids up to the first turn. A `note` of ours stands last in them. Raises: BadObservation, and what a chat
        template raises."""
        return self.dialogue.encode_opening(self.prompt, self.observation, note)


@dataclass(frozen=True, slots=True)
class TurnAnswer:
    """What the environment and sub-agents answer to a turn, as text."""

    observation: str | tuple[str, ...]
    """One text for each call, or a single text."""
    calls: int
    """Number of tool calls in the turn."""
    ended: bool
    """Whether the turn ends with an end token; False if it was cut."""
    turn: str = ""
    """Text of the turn that is answered."""

    @property
    def texts(self) -> tuple[str, ...]:
        """The observation as a tuple of texts."""
        return (self.observation,) if isinstance(self.observation, str) else self.observation

    def ids(self, dialogue: Dialogue, note: str = "") -> list[int]:
        """Return the token ids between the turn and the next one. A `note` of ours stands last in them. Raises: BadObservation,
        and what a chat template raises."""
        return dialogue.encode_following(
            self.observation, calls=self.calls, ended=self.ended, note=note, turn=self.turn
        )
