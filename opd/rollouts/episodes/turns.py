"""An episode as texts and as tokens: the opening, the answer to each turn, and the history of tokens that the policy reads.

head | turn | following | turn | following | ...      `Opening.encode` gives the head, `TurnAnswer.encode` what follows a turn
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from opd.rollouts.episodes.chat import ChatAppender
from opd.rollouts.episodes.dialogue import Dialogue

if TYPE_CHECKING:
    from opd.prompts.conversation import Messages


@dataclass(slots=True)
class History:
    """The tokens of a dialogue up to its next turn, piece by piece, because a compaction or a chat template drops some of them."""

    head: list[int]
    """Tokens before the first turn: prompt and first observation, or a summary."""
    turns: list[tuple[list[int], list[int]]] = field(default_factory=list)
    """The tokens of each turn, and those that follow it, up to the next turn."""

    @property
    def ids(self) -> list[int]:
        """All tokens of the history, in order."""
        return self.head + [token for turn_ids, following_ids in self.turns for token in (*turn_ids, *following_ids)]

    def replace_end(self, following_ids: list[int]) -> History:
        """Return a history that has `following_ids` after the last turn, and is else the same."""
        last_turn_ids, _ = self.turns[-1]
        return History(self.head, [*self.turns[:-1], (last_turn_ids, following_ids)])

    def without_thoughts(self, dialogue: Dialogue | ChatAppender) -> History:
        """Return the history without the thoughts in its turns, which some chat templates leave out. The endpoint
        of agent programs has a `ChatAppender` and no `Dialogue`. Raises: what a chat template raises."""
        turns = [(dialogue.without_thoughts(turn_ids), following_ids) for turn_ids, following_ids in self.turns]
        return History(self.head, turns)


@dataclass(frozen=True, slots=True)
class Opening:
    """The beginning of an episode: its prompt and the first observation."""

    dialogue: Dialogue
    prompt: str | Messages
    observation: str | Messages

    @property
    def texts(self) -> list[str]:
        """The first observation as a list of texts: itself, or the contents of its messages."""
        observation = self.observation
        return [observation] if isinstance(observation, str) else [message["content"] for message in observation]

    def encode(self, note: str = "") -> list[int]:
        """Return the token ids up to the first turn. A `note`, such as the summary of a compaction, stands last in them. Raises:
        BadObservation, and what a chat template raises."""
        return self.dialogue.encode_opening(self.prompt, self.observation, note)


@dataclass(frozen=True, slots=True)
class TurnAnswer:
    """Answer of the environment and sub-agents to a turn, as text."""

    observation: str | tuple[str, ...]
    """One text for each tool call, or a single text if the turn has none or cannot be read."""
    calls: int
    """Number of tool calls in the turn."""
    ended: bool
    """True if the turn ends with an end token, False if it was cut."""
    turn: str = ""
    """Text of the turn that is answered."""

    @property
    def texts(self) -> tuple[str, ...]:
        """The observation as a tuple of texts."""
        return (self.observation,) if isinstance(self.observation, str) else self.observation

    def encode(self, dialogue: Dialogue, note: str = "") -> list[int]:
        """Return the token ids between the turn and the next one. A `note`, such as the request for a summary, stands last in them. Raises:
        BadObservation, and what a chat template raises."""
        return dialogue.encode_following(
            self.observation, calls=self.calls, ended=self.ended, note=note, turn=self.turn
        )
