"""Mastermind: find a code of letters. Each guess is answered with two numbers: right letters in place, and in another place."""

from __future__ import annotations

import random
import string
from collections import Counter
from collections.abc import Mapping
from itertools import product
from typing import Any

from pydantic import Field

from opd.environments.game import Game, GameOptions

Guesses = tuple[str, ...]


class MastermindOptions(GameOptions):
    length: int = Field(3, ge=2, le=4)
    """Letters of the code; each may come more than once."""
    letters: int = Field(4, ge=2, le=6)
    """How many letters there are to choose from, from a on."""


class Mastermind(Game[Guesses]):
    """Find a code of up to four letters; the prompt has a first guess and its answer."""

    name = "mastermind"
    Options = MastermindOptions
    pattern = r"\b([a-f]{2,4})\b"
    moves = "a code"

    @classmethod
    def draw(cls, rng: random.Random, options: MastermindOptions) -> dict[str, Any]:
        letters = string.ascii_lowercase[: options.letters]
        secret, first_guess = ("".join(rng.choices(letters, k=options.length)) for _ in range(2))
        while first_guess == secret:
            first_guess = "".join(rng.choices(letters, k=options.length))
        return {"letters": options.letters, "secret": secret, "first": first_guess}

    def begin(self, task: Mapping[str, Any]) -> Guesses:
        """Return the state: the guesses so far, of which the first one comes with the task."""
        self._letters = string.ascii_lowercase[: task["letters"]]
        for code in (task["secret"], task["first"]):
            if not set(code) <= set(self._letters) or len(code) != len(task["secret"]) or not 2 <= len(code) <= 4:
                raise ValueError(f"code {code!r:.40}")
        return (str(task["first"]),)

    def board(self) -> str:
        code_format = f"{len(self.task['secret'])}{self._letters[-1]}"
        return f" {code_format}" if self.task["form"] == "characters" else ""

    def rules(self) -> str:
        return (
            f"Find my code of {len(self.task['secret'])} letters from a to {self._letters[-1]}; a letter may come more than once. "
            "I tell you how many letters of a guess are right and in place, and how many more are in the code at another place. "
            "Answer with one code."
        )

    def show(self, state: Guesses) -> str:
        right, near = score_guess(state[-1], self.task["secret"])
        return f"{state[-1]}:{right}.{near}"

    def tell(self, state: Guesses) -> str:
        right, near = score_guess(state[-1], self.task["secret"])
        return f"{state[-1]}: {right} in place, {near} at another place."

    def solved(self, state: Guesses) -> bool:
        return state[-1] == str(self.task["secret"])

    def problem(self, state: Guesses, move: str) -> str:
        fits = len(move) == len(self.task["secret"]) and set(move) <= set(self._letters)
        return "" if fits else f"{move} is no code."

    def after(self, state: Guesses, move: str) -> Guesses:
        return (*state, move)

    def best(self, state: Guesses) -> str:
        """Return the first code that fits all answers; each such guess rules out at least itself."""
        answers = [(guess, score_guess(guess, self.task["secret"])) for guess in state]
        codes = map("".join, product(self._letters, repeat=len(self.task["secret"])))
        return next(code for code in codes if all(score_guess(guess, code) == answer for guess, answer in answers))


def score_guess(guess: str, secret: str) -> tuple[int, int]:
    """Count the letters that are right and in place, and those that are in the code at another place."""
    right = sum(a == b for a, b in zip(guess, secret, strict=True))
    return right, (Counter(guess) & Counter(secret)).total() - right
