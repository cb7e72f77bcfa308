"""The Towers of Hanoi: bring all disks to the last peg, one at a time, never a larger one on a smaller one."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

from pydantic import Field

from opd.environments.game import Game, GameOptions

PEGS = "abc"
GOAL = "c"


class HanoiOptions(GameOptions):
    disks: int = Field(3, ge=2, le=7)
    """There are three to the power of this many states, and one task in each but the last."""


class Hanoi(Game[str]):
    """Bring a tower of up to seven disks to the third peg, from any state."""

    name = "hanoi"
    Options = HanoiOptions
    move_pattern = r"\b([abc][abc])\b"
    move_examples = "ab ac ba bc ca cb"

    @classmethod
    def draw_task(cls, rng: random.Random, options: HanoiOptions) -> dict[str, Any]:
        while (start := "".join(rng.choices(PEGS, k=options.disks))) == GOAL * options.disks:
            pass
        return {"start": start}

    def begin(self, task: Mapping[str, Any]) -> str:
        """Return the state: the peg of each disk, that of the smallest first."""
        if not set(task["start"]) <= set(PEGS):
            raise ValueError(f"pegs {task['start']!r:.40}")
        return str(task["start"])

    def render_rules(self) -> str:
        return (
            "Towers of Hanoi: bring all disks to peg c. Only the top disk of a peg can be moved, and never onto a smaller one. "
            "Answer with the peg to take from and the peg to put on, for example: ac"
        )

    def render_characters(self, state: str) -> str:
        return state

    def render_words(self, state: str) -> str:
        towers = {peg: [str(disk) for disk, at in enumerate(state, start=1) if at == peg] for peg in PEGS}
        descriptions = (f"{peg}: {' '.join(reversed(disks)) or 'empty'}" for peg, disks in towers.items())
        return f"Disks from bottom to top, 1 is the smallest. {', '.join(descriptions)}."

    def is_solved(self, state: str) -> bool:
        return state == GOAL * len(state)

    def explain_impossible_move(self, state: str, move: str) -> str:
        source, target = move[0], move[1]
        if source == target:
            return "A disk has to go to another peg."
        if source not in state:
            return f"There is no disk on peg {source}."
        if target in state and state.index(target) < state.index(source):
            return f"The top disk of peg {target} is smaller."
        return ""

    def apply_move(self, state: str, move: str) -> str:
        disk = state.index(move[0])
        return state[:disk] + move[1] + state[disk + 1 :]

    def choose_best_move(self, state: str) -> str:
        """Return the next move. The largest disk that is not in place has to go to its goal. Before it can, all smaller disks have to go
        to the third peg, which is thus the goal of the next smaller disk, and so on. The move is that of the smallest disk that is not at
        its goal."""
        goal, move = GOAL, ""
        for peg in reversed(state):
            if peg != goal:
                move = peg + goal
                goal = next(spare_peg for spare_peg in PEGS if spare_peg not in move)
        return move
