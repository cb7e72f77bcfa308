"""The tokens of an episode that an expert learns: exactly those that a rollout of the same turns has.

    rollout   P P P P  s s s s  o o o  s s s  o o  s s        P prompt, s sampled by the policy, o observation
    learned            1 1 1 1  0 0 0  0 0 0  0 0  1 1        the second turn is a mistake: weight 0

The same two dialogues that a rollout has, `opd.rollouts.episodes.dialogue`, make them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from datetime import date
from typing import TYPE_CHECKING, Any

from jinja2 import TemplateError

from experts.episodes.rows import EpisodeRow, Turn, is_learned
from opd.errors import PromptError
from opd.prompts.encode import encode_text
from opd.prompts.harmless import escape_specials, special_texts
from opd.rollouts.episodes.chat import ChatAppender
from opd.rollouts.episodes.dialogue import BadObservation, ChatDialogue, Dialogue, PlainDialogue
from opd.rollouts.episodes.turns import History
from opd.tool_formats import AUTO, forbidden_in_turns

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class EpisodeEncoder:
    """Turn episodes into tokens with one tokenizer. Its chat template is proven once, when the first chat comes.

    `day` is the date for a chat template that asks for one; None: today. `parser` is the name of the format of tool calls. `ends`
    are the model's end tokens, for a template that ends turns with another one than the tokenizer's own; `variables` are the template's.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        day: date | None = None,
        parser: str = AUTO,
        ends: Sequence[int] = (),
        variables: Mapping[str, Any] | None = None,
    ) -> None:
        self._tokenizer = tokenizer
        self._day = day
        self._parser = parser
        self._variables = variables
        self._end: int = tokenizer.eos_token_id
        self._stops = sorted({self._end, *ends})
        self._appender: ChatAppender | None = None

    def encode(self, row: EpisodeRow) -> tuple[list[int], list[bool]]:
        """Return the token ids of the whole episode up to its last turn, and for each whether it is learned.

        Raises: PromptError for an observation that no rollout accepts, messages that the template refuses, or thoughts that it
        leaves out before a later turn; ModelError if the template cannot append.
        """
        prompt, ids, learn = self.encode_apart(row)
        return prompt + ids, [False] * len(prompt) + learn

    def encode_apart(self, row: EpisodeRow) -> tuple[list[int], list[int], list[bool]]:
        """Return the same in two: ids of what stands before the first turn, ids of what follows, and for each of these whether it is
        learned. Raises: as `encode`."""
        parts = self._split_turns(row)
        prompt = parts[0][0]
        ids, learned = list(prompt), list[bool]()
        for prefix, turn_ids, is_learned_turn in parts:
            if prefix[: len(ids)] != ids:
                raise PromptError.at(
                    f"the episode of prompt {row.prompt!r:.80}",
                    found="thoughts in a turn, which the chat template leaves out before the next one",
                    wanted="turns that a rollout reads as they were written",
                    fix="leave the thoughts of all turns but the last one out, or make a row of each turn",
                )
            learned += [False] * (len(prefix) - len(ids)) + [is_learned_turn] * len(turn_ids)
            ids = prefix + turn_ids
        return prompt, ids[len(prompt) :], learned

    def encode_prefixes(self, row: EpisodeRow) -> list[list[int]]:
        """Return the token ids of what stands before each turn, without the thoughts that the chat template leaves out by then. Raises: as
        `encode`, but for thoughts."""
        return [prefix for prefix, _, _ in self._split_turns(row)]

    def _split_turns(self, row: EpisodeRow) -> list[tuple[list[int], list[int], bool]]:
        """Return, for each turn, the ids before it, its own ids, and whether it is learned. Raises: as `encode`."""
        try:
            return list(self._encode_turns(row, self._dialogue(row)))
        except (BadObservation, TemplateError) as error:
            raise PromptError.at(
                f"the episode of prompt {row.prompt!r:.80}",
                found=str(error),
                wanted="messages that the student can read in a rollout",
                fix="correct or delete this row",
            ) from None

    def _encode_turns(self, row: EpisodeRow, dialogue: Dialogue) -> Iterator[tuple[list[int], list[int], bool]]:
        history = History(dialogue.encode_opening(row.prompt, _first_messages(row.observations[0])))
        end = self._end if self._appender is None or isinstance(row.prompt, str) else self._appender.end_id
        forbidden = forbidden_in_turns(special_texts(self._tokenizer))
        for turn, observation in zip(row.turns, [*row.observations[1:], None], strict=True):
            turn_ids = [*encode_text(self._tokenizer, escape_specials(turn["content"], forbidden)), end]
            yield history.ids, turn_ids, is_learned(turn)
            if observation is not None:
                texts = tuple(message["content"] for message in observation)
                calls = len(texts) if observation[0]["role"] == "tool" else 0
                observation_ids = dialogue.encode_following(texts if calls else texts[0], calls=calls, ended=True)
                history.turns.append((turn_ids, observation_ids))
                if dialogue.drops_thoughts(calls=calls):
                    history = history.without_thoughts(dialogue)

    def _dialogue(self, row: EpisodeRow) -> Dialogue:
        if isinstance(row.prompt, str):
            return PlainDialogue(self._tokenizer, row.tools, self._stops)
        if self._appender is None:
            self._appender = ChatAppender(self._tokenizer, self._stops, self._day, self._parser, self._variables)
        return ChatDialogue(self._appender, row.tools)


def _first_messages(messages: Sequence[Turn]) -> str | list[dict[str, str]]:
    """Return the first observation, as an environment gives it: text, or several messages."""
    if len(messages) > 1:
        return [{"role": turn["role"], "content": turn["content"]} for turn in messages]
    return messages[0]["content"] if messages else ""
