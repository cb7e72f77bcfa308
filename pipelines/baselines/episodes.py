"""Mixed SFT on whole episodes: rows of a prompts file with `messages`, as the tokens of a rollout of the same turns.

prompts file ─ the rows that are trained on ─→ EpisodeEncoder, that of experts' training ─→ FileEpisode ─→ Rollout
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

from experts.episodes.rows import read_episode_at
from opd.config.prompts import PromptsConfig, as_prompts_config
from opd.errors import PromptError
from opd.prompts import PromptTable, find_source
from opd.prompts.readers import RowLocation, source_rows
from opd.records.types import Prompt, Rollout, Span

if TYPE_CHECKING:
    from experts.episodes.encode import EpisodeEncoder

EPISODE = ("messages", "tools")
"""Columns of an episode. The prompt is the merge's, which may have another name in the file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FileEpisode:
    """An episode of a prompts file in tokens."""

    prompt_ids: tuple[int, ...]
    """[P] what stands before the first turn: the prompt, tools, a first observation."""
    response_ids: tuple[int, ...]
    """[R] turns and observations, up to the end token of the last turn."""
    learned: tuple[bool, ...]
    """[R] True for the turns of weight 1, their end tokens included."""

    def fits_context(self, room: int) -> bool:
        """Return True if a context of `room` tokens holds the whole episode."""
        return len(self.prompt_ids) + len(self.response_ids) <= room

    def as_rollout(self, prompt: Prompt, room: int) -> Rollout:
        """Return the episode's first `room` tokens in the shape of a rollout, in which only what is learned is trained."""
        response_room = max(0, room - len(self.prompt_ids))
        rollout = Rollout.from_tokens(prompt.id, self.prompt_ids, self.response_ids[:response_room], prompt.domain)
        # Runs of tokens that are all learned, or all not: only spans of the policy carry a loss.
        spans = tuple(
            Span(length=len(list(run)), origin="policy" if learned else "environment", policy_version=0)
            for learned, run in groupby(self.learned[:response_room])
        )
        return replace(rollout, spans=spans, stop_reason="done" if self.fits_context(room) else "context")


def read_file_episodes(
    source: Path | PromptsConfig, prompts: PromptTable, encoder: EpisodeEncoder, room: int
) -> dict[str, FileEpisode]:
    """Return prompt id -> episode, for all of `prompts`; rows of other prompts are not looked at. `room`: tokens of the
    context.

    Raises: PromptError for a broken row, or one whose learned turns all lie beyond `room`; ModelError for a chat template that
    cannot append.
    """
    position_by_row = {prompts.rows.row_number(int(index)): location for location, index in enumerate(prompts.indices)}
    episodes = {}
    for number, (location, row) in enumerate(source_rows(find_source(source), as_prompts_config(source))):
        if number in position_by_row:
            prompt = prompts[position_by_row[number]]
            episodes[prompt.id] = _encode_episode(location, row, prompt, encoder)
            if not episodes[prompt.id].as_rollout(prompt, room).num_trained:
                raise _nothing_to_learn(location, episodes[prompt.id], room)
    return episodes


def cut_notice(answers: Iterable[object], room: int) -> str:
    """Return a sentence about the episodes that `room` tokens do not hold; empty if there are none."""
    fitting = [episode.fits_context(room) for episode in answers if isinstance(episode, FileEpisode)]
    if all(fitting):
        return ""
    cut = len(fitting) - sum(fitting)
    return f"{cut} of {len(fitting)} episodes are longer than rollout.max_model_len = {room} and are cut there"


def _encode_episode(location: RowLocation, row: dict[str, Any], prompt: Prompt, encoder: EpisodeEncoder) -> FileEpisode:
    """Return the episode of one row, after the prompt as the merge reads it. Raises: PromptError, ModelError."""
    fields = {"prompt": prompt.text} | {name: row[name] for name in EPISODE if name in row}
    prompt_ids, response_ids, learned = encoder.encode_prompt_and_rest(read_episode_at(location, fields))
    return FileEpisode(prompt_ids=tuple(prompt_ids), response_ids=tuple(response_ids), learned=tuple(learned))


def _nothing_to_learn(location: RowLocation, episode: FileEpisode, room: int) -> PromptError:
    first_learned = len(episode.prompt_ids) + episode.learned.index(True) + 1
    return PromptError.at(
        str(location),
        found=f"an episode whose first learned token is its {first_learned:,}th",
        wanted=f"one within rollout.max_model_len = {room}: mixed_sft trains on as much of an episode as fits",
        fix="raise rollout.max_model_len, or delete this line",
    )
