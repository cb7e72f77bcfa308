"""What stands before and after the turns of an episode, still as text: it becomes tokens once, in one place."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from opd.rollouts.episodes.dialogue import Dialogue

if TYPE_CHECKING:
    from opd.prompts.conversation import Messages


@dataclass(frozen=True, slots=True)
class Opening:
    """What an episode begins with."""

    dialogue: Dialogue
    prompt: str | Messages
    observation: str | Messages

    @property
    def texts(self) -> list[str]:
        """The texts of the first observation."""
        seen = self.observation
        return [seen] if isinstance(seen, str) else [message["content"] for message in seen]

    def ids(self, note: str = "") -> list[int]:
        """Token ids up to the first turn; `note` stands last. Raises: BadObservation, and what a chat template raises."""
        return self.dialogue.first(self.prompt, self.observation, note)


@dataclass(frozen=True, slots=True)
class Answer:
    """What follows a turn."""

    observation: str | tuple[str, ...]
    calls: int
    """Tool calls of the turn."""
    ended: bool
    """Whether the turn ends with an end token."""

    @property
    def texts(self) -> tuple[str, ...]:
        """The observation, one text for each call."""
        return (self.observation,) if isinstance(self.observation, str) else self.observation

    def ids(self, dialogue: Dialogue, note: str = "") -> list[int]:
        """Token ids up to the next turn; `note` stands last. Raises: BadObservation, and what a chat template raises."""
        return dialogue.after(self.observation, calls=self.calls, ended=self.ended, note=note)
