"""The tokens of an episode that an expert learns: exactly those that a rollout of the same turns has.

    rollout   P P P P  s s s s  o o o  s s s  o o  s s        P prompt, s sampled by the policy, o observation
    learned            1 1 1 1  0 0 0  0 0 0  0 0  1 1        the second turn is a mistake: weight 0

The same two dialogues that a rollout has, `opd.rollouts.episodes.dialogue`, make them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from jinja2 import TemplateError

from experts.episodes.rows import EpisodeRow, Turn, learned
from opd.errors import PromptError
from opd.prompts.encode import encode_text
from opd.rollouts.episodes.chat import ChatAppender
from opd.rollouts.episodes.dialogue import BadObservation, ChatDialogue, Dialogue, PlainDialogue

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class EpisodeEncoder:
    """Turns episodes into tokens with one tokenizer. Its chat template is proven once, when the first chat comes."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        self._end: int = tokenizer.eos_token_id
        self._appender: ChatAppender | None = None

    def encode(self, row: EpisodeRow) -> tuple[list[int], list[bool]]:
        """Token ids of the whole episode up to its last turn, and for each whether it is learned.

        Raises: PromptError for an observation that no rollout accepts or messages that the template refuses; ModelError if
        the template cannot append.
        """
        try:
            return self._encoded(row, self._dialogue(row))
        except (BadObservation, TemplateError) as error:
            raise PromptError.at(
                f"the episode of prompt {row.prompt!r:.80}",
                found=str(error),
                wanted="messages that the student can read in a rollout",
                fix="correct or delete this row",
            ) from None

    def _encoded(self, row: EpisodeRow, dialogue: Dialogue) -> tuple[list[int], list[bool]]:
        ids = dialogue.first(row.prompt, _first(row.observations[0]))
        learn = [False] * len(ids)
        for number, turn in enumerate(row.turns):
            said = [*encode_text(self._tokenizer, turn["content"]), self._end]
            read = self._after(dialogue, row.observations[number + 1 : number + 2])
            ids += said + read
            learn += [learned(turn)] * len(said) + [False] * len(read)
        return ids, learn

    def _after(self, dialogue: Dialogue, following: Sequence[Sequence[Turn]]) -> list[int]:
        """Tokens between a turn and the next one; none after the last."""
        if not following:
            return []
        (messages,) = following
        texts = tuple(turn["content"] for turn in messages)
        results = messages[0]["role"] == "tool"
        return dialogue.after(texts if results else texts[0], calls=len(texts) if results else 0, ended=True)

    def _dialogue(self, row: EpisodeRow) -> Dialogue:
        if isinstance(row.prompt, str):
            return PlainDialogue(self._tokenizer, row.tools)
        if self._appender is None:
            self._appender = ChatAppender(self._tokenizer, [self._end])
        return ChatDialogue(self._appender, row.tools)


def _first(messages: Sequence[Turn]) -> str | list[dict[str, str]]:
    """The first observation, as an environment gives it: text, or several messages."""
    if len(messages) > 1:
        return [{"role": turn["role"], "content": turn["content"]} for turn in messages]
    return messages[0]["content"] if messages else ""
