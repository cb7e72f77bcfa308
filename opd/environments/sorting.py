"""Sort digits by swapping neighbours."""

from __future__ import annotations

import random
import string
from collections.abc import Mapping
from typing import Any

from pydantic import Field

from opd.environments.game import Game, GameOptions


class SortingOptions(GameOptions):
    digits: int = Field(5, ge=3, le=9)
    """Number of digits to sort, all different."""


class Sorting(Game[str]):
    """Bring up to nine digits into order by swaps of neighbours."""

    name = "sorting"
    Options = SortingOptions
    move_pattern = r"\b(\d)\b"
    move_examples = "a place"

    @classmethod
    def draw_task(cls, rng: random.Random, options: SortingOptions) -> dict[str, Any]:
        digits = sorted(rng.sample(string.digits, options.digits))
        start = digits.copy()
        while start == digits:
            rng.shuffle(start)
        return {"start": "".join(start)}

    def begin(self, task: Mapping[str, Any]) -> str:
        if not task["start"].isdigit() or len(set(task["start"])) != len(task["start"]):
            raise ValueError(f"digits {task['start']!r:.40}")
        return str(task["start"])

    def render_rules(self) -> str:
        last = len(self.task["start"]) - 1
        return (
            "Sort the digits, the smallest first. A move swaps two neighbours. "
            f"Answer with the place of the left one of them, a number from 1 to {last}."
        )

    def render_characters(self, state: str) -> str:
        return state

    def render_words(self, state: str) -> str:
        return f"The digits are {' '.join(state)}."

    def is_solved(self, state: str) -> bool:
        return list(state) == sorted(state)

    def explain_impossible_move(self, state: str, move: str) -> str:
        return "" if 1 <= int(move) < len(state) else f"There is no pair of neighbours at place {move}."

    def apply_move(self, state: str, move: str) -> str:
        index = int(move) - 1
        return state[:index] + state[index + 1] + state[index] + state[index + 2 :]

    def choose_best_move(self, state: str) -> str:
        """Return the place of the first pair in the wrong order: each such swap takes away one of the pairs that stand the
        wrong way round."""
        return next(str(i + 1) for i in range(len(state) - 1) if state[i] > state[i + 1])
