"""Make prompts of prefixes of recorded episodes. In a merge the student writes one turn after each; no environment runs.

    episode    P P P  T T T  o o  T T  o o  T T          P prompt, T turn of the expert or the solver, o observation
    prompts    P P P
               P P P  T T T  o o
               P P P  T T T  o o  T T  o o

A prompt is text, with special tokens spelled out. It is used only if the student's tokenizer encodes it to the same ids that a
rollout of the same turns has. So the expert is asked about sequences of the kind that it was trained on.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

from experts.episodes.encode import EpisodeEncoder
from experts.episodes.rows import is_learned, read_episodes
from opd.config.prompts import as_prompts_config
from opd.errors import PromptError
from opd.prompts import find_source
from opd.prompts.encode import encode_prompt
from opd.prompts.readers import source_rows
from opd.tool_formats import AUTO

TURN = "turn"
"""Key of a prefix's metadata with the number of the turn that follows it, from 0."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prefixes:
    """Prefixes as rows of a prompts file."""

    rows: tuple[dict[str, Any], ...]
    left_out: int
    """Number of prefixes that are left out because their text would become other tokens."""


def read_prefixes(
    episodes: Path,
    tokenizer: Any,
    ends: Sequence[int] = (),
    day: date | None = None,
    parser: str = AUTO,
    variables: Mapping[str, Any] | None = None,
) -> Prefixes:
    """Return a row for every turn of every episode in a file, in order.

    The row's answer is the turn, or empty if the turn is a mistake. `ends`: end tokens of the model besides the tokenizer's.
    `day`, `parser` and `variables`: see `EpisodeEncoder`. Raises: PromptError for a broken row, or if no prefix is left;
    ModelError for a chat template to which turns cannot be appended.
    """
    encoder = EpisodeEncoder(tokenizer, day, parser, ends, variables)
    rows: list[dict[str, Any]] = []
    left_out = 0
    for row, (_, data) in zip(
        read_episodes(episodes), source_rows(find_source(episodes), as_prompts_config(episodes)), strict=True
    ):
        metadata = data.get("metadata") or {}
        for number, (ids, turn) in enumerate(zip(encoder.encode_prefixes(row), row.turns, strict=True)):
            text = tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
            if list(encode_prompt(tokenizer, text)) != ids:
                left_out += 1
                continue
            answer = turn["content"] if is_learned(turn) else ""
            rows.append({"prompt": text, "answer": answer, "metadata": {**metadata, TURN: number}})
    if not rows:
        raise PromptError.at(
            episodes,
            found=f"{left_out} prefixes, of which none has a text that gives its tokens",
            wanted="prefixes that the student's tokenizer reads as an episode has them",
            fix="is --model the student that the episodes are for? Else train on whole episodes",
        )
    return Prefixes(rows=tuple(rows), left_out=left_out)
