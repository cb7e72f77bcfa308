"""The tokens of an episode that an expert learns: exactly those that a rollout of the same turns has.

    rollout   P P P P  s s s s  o o o  s s s  o o  s s        P prompt, s sampled by the policy, o observation
    learned            1 1 1 1  0 0 0  0 0 0  0 0  1 1        the second turn is a mistake: weight 0

The classes that encode a rollout, `PlainDialogue` and `ChatDialogue`, encode here too, so the tokens are the same.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from datetime import date
from typing import TYPE_CHECKING, Any

from jinja2 import TemplateError

from experts.episodes.rows import EpisodeRow, Turn, is_learned
from opd.errors import PromptError
from opd.prompts.encode import encode_text
from opd.prompts.untrusted_text import escape_specials, special_texts
from opd.rollouts.episodes.chat import ChatAppender
from opd.rollouts.episodes.dialogue import BadObservation, ChatDialogue, Dialogue, PlainDialogue
from opd.rollouts.episodes.turns import History
from opd.tool_formats import AUTO, forbidden_in_turns
from opd.tool_formats.records import BadCall

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class EpisodeEncoder:
    """Encodes episodes with one tokenizer. Its chat template is proven once, when the first chat comes.

    `day` is the date for a chat template that asks for one; None: today. `parser` is the name of the format of tool calls. `ends`
    are the ids of the model's end tokens, for a template that ends turns with another one than the tokenizer's own. `variables` are
    values for the template.
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
        prompt, rest, learned = self.encode_prompt_and_rest(row)
        return prompt + rest, [False] * len(prompt) + learned

    def encode_prompt_and_rest(self, row: EpisodeRow) -> tuple[list[int], list[int], list[bool]]:
        """Return the ids of what stands before the first turn, those of the rest, and for each of the rest whether it is learned.

        Raises: as `encode`.
        """
        parts = self._encode_parts(row)
        prompt, _, _ = parts[0]
        ids, learned = list(prompt), list[bool]()
        for prefix, turn_ids, is_learned_turn in parts:
            if prefix[: len(ids)] != ids:  # the template has left thoughts out of turns that stand in `ids` already
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
        """Return the token ids of what stands before each turn, without the thoughts that the chat template leaves out by then.

        Raises: as `encode`, except for thoughts that are left out.
        """
        return [prefix for prefix, _, _ in self._encode_parts(row)]

    def _encode_parts(self, row: EpisodeRow) -> list[tuple[list[int], list[int], bool]]:
        """Return, for each turn, the ids before it, its own ids, and whether it is learned. Raises: as `encode`."""
        try:
            return list(self._encode_turns(row))
        except (BadObservation, TemplateError) as error:
            raise PromptError.at(
                f"the episode of prompt {row.prompt!r:.80}",
                found=str(error),
                wanted="messages that the student can read in a rollout",
                fix="correct or delete this row",
            ) from None

    def _encode_turns(self, row: EpisodeRow) -> Iterator[tuple[list[int], list[int], bool]]:
        """Yield, for each turn, the ids before it, its own ids, and whether it is learned. Raises: what the dialogue raises."""
        appender = None if isinstance(row.prompt, str) else self._prove_once()
        dialogue: Dialogue = (
            PlainDialogue(self._tokenizer, row.tools, self._stops)
            if appender is None
            else ChatDialogue(appender, row.tools)
        )
        history = History(dialogue.encode_opening(row.prompt, _first_observation(row.observations[0])))
        forbidden = forbidden_in_turns(special_texts(self._tokenizer))
        for turn, answers in zip(row.turns, [*row.observations[1:], None], strict=True):
            text = turn["content"]
            num_calls = _count_calls(text, answers, dialogue)
            end = self._end if appender is None else appender.end_id(calls=bool(num_calls))
            turn_ids = [*encode_text(self._tokenizer, escape_specials(text, forbidden)), end]
            yield history.ids, turn_ids, is_learned(turn)
            if answers is None:
                return
            contents = tuple(message["content"] for message in answers)
            # One text for each call, or the one message that follows a turn without calls. Every turn has its end token here.
            observation = contents if num_calls else contents[0]
            following_ids = dialogue.encode_following(observation, calls=num_calls, ended=True, turn=text)
            history.turns.append((turn_ids, following_ids))
            # As in a rollout: from here on the policy reads no thoughts of these turns.
            if dialogue.drops_thoughts(calls=num_calls):
                history = history.without_thoughts(dialogue)

    def _prove_once(self) -> ChatAppender:
        if self._appender is None:
            self._appender = ChatAppender(self._tokenizer, self._stops, self._day, self._parser, self._variables)
        return self._appender


def _count_calls(text: str, answers: Sequence[Turn] | None, dialogue: Dialogue) -> int:
    """Return the number of tool calls of a turn: some templates end one with calls by another token.

    Each call is answered by one message of the role `tool`. The last turn has no answers (None), so its text is read as a rollout
    reads it, where a call that cannot be read counts as one.
    """
    if answers is not None:
        return sum(message["role"] == "tool" for message in answers)
    try:
        return len(dialogue.calls(text))
    except BadCall:
        return 1


def _first_observation(messages: Sequence[Turn]) -> str | list[dict[str, str]]:
    """Return the first observation, as an environment gives it: text, or several messages."""
    if len(messages) > 1:
        return [{"role": message["role"], "content": message["content"]} for message in messages]
    return messages[0]["content"] if messages else ""
