"""Lights out: a press turns a light and its neighbours over; all have to go out."""

from __future__ import annotations

import random
import re
from collections.abc import Mapping
from itertools import product
from typing import Any

from pydantic import Field

from opd.environments.game import Game, GameOptions

COLUMNS = "abcde"
Lights = tuple[int, ...]
"""One number a row: bit `column` is set where the light is on."""


class LightsOptions(GameOptions):
    size: int = Field(3, ge=2, le=5)
    """Rows and columns."""


class LightsOut(Game[Lights]):
    """Turn all lights of a grid of up to 5 x 5 off; each press turns the neighbours too."""

    name = "lights"
    Options = LightsOptions
    pattern = r"\b([a-e][1-5])\b"
    moves = "a1 b1 a2 .."

    @classmethod
    def draw(cls, rng: random.Random, options: LightsOptions) -> dict[str, Any]:
        size = options.size
        state: Lights = (0,) * size
        while not any(state):
            for row, column in rng.sample(list(product(range(size), repeat=2)), rng.randint(1, size * size)):
                state = press_light(state, row, column)
        return {"start": render_rows(state)}

    def begin(self, task: Mapping[str, Any]) -> Lights:
        rows = task["start"].split(":")
        if not re.fullmatch(r"[o.:]+", task["start"]) or {len(row) for row in rows} != {len(rows)} or len(rows) > 5:
            raise ValueError(f"lights {task['start']!r:.40}")
        state = tuple(sum(1 << column for column, sign in enumerate(row) if sign == "o") for row in rows)
        if fewest_presses(state) is None:
            raise ValueError(f"lights {task['start']}, which no presses turn off")
        return state

    def rules(self) -> str:
        last = f"{COLUMNS[len(self.state) - 1]}{len(self.state)}"
        return (
            "Turn off all lights: o is on, . is off. A press turns a light over, and those above, below, left and right of it. "
            f"Columns are letters, rows are numbers from the top. Answer with a light from a1 to {last}."
        )

    def show(self, state: Lights) -> str:
        return render_rows(state)

    def tell(self, state: Lights) -> str:
        return "The lights are:\n" + render_rows(state).replace(":", "\n")

    def solved(self, state: Lights) -> bool:
        return not any(state)

    def problem(self, state: Lights, move: str) -> str:
        inside = COLUMNS.index(move[0]) < len(state) and int(move[1]) <= len(state)
        return "" if inside else f"There is no light {move}."

    def after(self, state: Lights, move: str) -> Lights:
        return press_light(state, int(move[1]) - 1, COLUMNS.index(move[0]))

    def best(self, state: Lights) -> str:
        presses = fewest_presses(state)
        assert presses, "presses keep a grid that can be turned off one that can"
        row, column = presses[0]
        return f"{COLUMNS[column]}{row + 1}"


def press_light(state: Lights, row: int, column: int) -> Lights:
    """Return the lights after one press, which turns over three lights of its own row and one of each row beside it."""
    bit, size = 1 << column, len(state)
    own_row = (bit | bit << 1 | bit >> 1) & ((1 << size) - 1)  # without lights outside of the grid
    flips = {row - 1: bit, row: own_row, row + 1: bit}
    return tuple(lights ^ flips.get(at, 0) for at, lights in enumerate(state))


def fewest_presses(state: Lights) -> list[tuple[int, int]] | None:
    """Return the fewest presses that turn everything off, as row and column; None if none do.

    No light has to be pressed twice, and the order does not matter. The presses in the first row decide all others, since a light of
    a row that is then still on can only be put out from the row below it. So each set of presses in the first row is tried.
    """
    size = len(state)
    ways = (_chase_lights(state, [c for c in range(size) if first_row >> c & 1]) for first_row in range(1 << size))
    return min((way for way in ways if way is not None), key=len, default=None)


def _chase_lights(state: Lights, columns: list[int]) -> list[tuple[int, int]] | None:
    """Press these columns of the first row, and then row by row what puts out the row above. Return all presses; None if lights of the
    last row stay on."""
    presses = []
    for row in range(len(state)):
        for column in columns:
            state = press_light(state, row, column)
            presses.append((row, column))
        columns = [column for column in range(len(state)) if state[row] >> column & 1]
    return None if any(state) else presses


def render_rows(state: Lights) -> str:
    """Render lights as rows of signs with `:` between them: `o` is on."""
    return ":".join("".join("o" if row >> column & 1 else "." for column in range(len(state))) for row in state)
