"""Guess a number: each guess is answered with the range that is left."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

from pydantic import Field

from opd.environments.game import Game, GameOptions

Range = tuple[int, int, bool]
"""Lowest and highest number that the secret may still be, and True once it was guessed."""


class NumberOptions(GameOptions):
    highest: int = Field(99, ge=3, le=9999)
    """Largest number there is; every task has a range of its own within 0 and this."""


class GuessTheNumber(Game[Range]):
    """Guess a number; a guess outside of what is left is allowed and tells nothing."""

    name = "number"
    Options = NumberOptions
    move_pattern = r"(?<![\w.-])(\d{1,4})(?![\w-])"
    move_examples = "a number"

    @classmethod
    def draw_task(cls, rng: random.Random, options: NumberOptions) -> dict[str, Any]:
        low, high = sorted(rng.sample(range(options.highest + 1), 2))
        return {"low": low, "high": high, "secret": rng.randint(low, high)}

    def begin(self, task: Mapping[str, Any]) -> Range:
        low, high = int(task["low"]), int(task["high"])
        if not low <= int(task["secret"]) <= high:
            raise ValueError(f"secret {task['secret']} outside of {low} to {high}")
        return low, high, False

    def render_rules(self) -> str:
        return "I think of a number. After each guess I tell you what is left. Answer with one number."

    def render_characters(self, state: Range) -> str:
        return f"{state[0]}:{state[1]}"

    def render_words(self, state: Range) -> str:
        return f"My number is one of {state[0]} to {state[1]}."

    def is_solved(self, state: Range) -> bool:
        return state[2]

    def explain_impossible_move(self, state: Range, move: str) -> str:
        return ""

    def apply_move(self, state: Range, move: str) -> Range:
        low, high, _ = state
        guess, secret = int(move), int(self.task["secret"])
        if guess < secret:
            return max(low, guess + 1), high, False
        return low, high if guess == secret else min(high, guess - 1), guess == secret

    def choose_best_move(self, state: Range) -> str:
        return str((state[0] + state[1]) // 2)
