"""A maze of up to 8 x 8 cells: walk to the goal.

A step into a wall leads nowhere, and no step leads to a place from which the goal cannot be reached.
"""

from __future__ import annotations

import random
import string
from collections.abc import Iterator, Mapping
from typing import Any

from pydantic import Field

from opd.environments.game import Game, GameOptions

Cell = tuple[int, int]
STEPS: dict[str, Cell] = {"u": (-1, 0), "d": (1, 0), "l": (0, -1), "r": (0, 1)}
WORDS = {"u": "up", "d": "down", "l": "left", "r": "right"}
LOOPS = 0.1
"""The chance that a wall between two ways is opened, so that there may be two ways to a goal."""


class MazeOptions(GameOptions):
    size: int = Field(5, ge=3, le=8)
    """Rows and columns."""
    mazes: int = Field(0, ge=0, le=26)
    """0: every task has a maze of its own, which the prompt shows. More: all tasks, whatever their seed, are in so many mazes,
    called a to z, which the prompt does not show: the player has to learn them."""


class Maze(Game[Cell]):
    """Find the way through a maze of up to 8 x 8 cells."""

    name = "maze"
    Options = MazeOptions
    pattern = r"\b(up|down|left|right|[udlr])\b"
    moves = "u d l r"

    @classmethod
    def draw(cls, rng: random.Random, options: MazeOptions) -> dict[str, Any]:
        number = rng.randrange(options.mazes) if options.mazes else None
        layout = rng if number is None else random.Random(f"maze/{options.size}/{number}")
        free = carve_maze(layout, options.size)
        start, goal = rng.sample(sorted(free), 2)
        size = range(options.size)
        return {
            "cells": ["".join("." if (row, column) in free else "+" for column in size) for row in size],
            "start": cell_name(start),
            "goal": cell_name(goal),
            "maze": "" if number is None else string.ascii_lowercase[number],
        }

    def begin(self, task: Mapping[str, Any]) -> Cell:
        self._free = {(r, c) for r, line in enumerate(task["cells"]) for c, sign in enumerate(line) if sign == "."}
        self._goal, start = parse_cell(task["goal"]), parse_cell(task["start"])
        self._distances = distances_to_goal(self._goal, self._free)
        if start not in self._distances:
            raise ValueError(f"no way from {task['start']} to {task['goal']}")
        return start

    def board(self) -> str:
        maze = self.task["maze"]
        if not maze:
            return "\n" + "\n".join(self.task["cells"]) + "\n"
        return f" {maze}" if self.task["form"] == "characters" else f"This is maze {maze}."

    def rules(self) -> str:
        return (
            "You walk through a maze. Rows are numbers from the top, columns are letters from the left, + is a wall. "
            "Answer with one step: up, down, left or right."
        )

    def show(self, state: Cell) -> str:
        return f"{cell_name(state)}{self.task['goal']}"

    def tell(self, state: Cell) -> str:
        ways = ", ".join(WORDS[step] for step, (r, c) in STEPS.items() if (state[0] + r, state[1] + c) in self._free)
        return f"You are at {cell_name(state)}, the goal is {self.task['goal']}. Free: {ways}."

    def read(self, text: str) -> str | None:
        move = super().read(text)
        return None if move is None else move[0]

    def solved(self, state: Cell) -> bool:
        return state == self._goal

    def problem(self, state: Cell, move: str) -> str:
        return "" if _neighbour(state, move) in self._free else f"There is a wall {WORDS[move]} of {cell_name(state)}."

    def after(self, state: Cell, move: str) -> Cell:
        return _neighbour(state, move)

    def best(self, state: Cell) -> str:
        return min(STEPS, key=lambda move: self._distances.get(_neighbour(state, move), len(self._free)))


def carve_maze(rng: random.Random, size: int) -> set[Cell]:
    """Return the free cells of a random maze: ways one cell wide and a few loops, with a way from each cell to each other one.

    A trail grows at random into cells that touch no other free cell, and goes back where there is none. Then some walls between
    two free cells are opened.
    """
    cells = {(row, column) for row in range(size) for column in range(size)}
    trail = [rng.choice(sorted(cells))]
    free = set(trail)
    while trail:
        ahead = [c for c in _neighbours(trail[-1]) if c in cells - free and sum(n in free for n in _neighbours(c)) == 1]
        if ahead:
            trail.append(rng.choice(ahead))
            free.add(trail[-1])
        else:
            trail.pop()
    between = sorted(c for c in cells - free if sum(n in free for n in _neighbours(c)) == 2)
    return free | {cell for cell in between if rng.random() < LOOPS}


def distances_to_goal(goal: Cell, free: set[Cell]) -> dict[Cell, int]:
    """Return cell -> number of steps to the goal, for every cell from which there is a way."""
    distances, reached = {goal: 0}, [goal]
    for cell in reached:  # the list grows meanwhile, nearer cells first
        for near in _neighbours(cell):
            if near in free and near not in distances:
                distances[near] = distances[cell] + 1
                reached.append(near)
    return distances


def cell_name(cell: Cell) -> str:
    """Return a cell as players write it: b3 is the second column of the third row."""
    return f"{string.ascii_lowercase[cell[1]]}{cell[0] + 1}"


def parse_cell(name: str) -> Cell:
    """Return the cell that `cell_name` calls by this name. Raises: ValueError, IndexError."""
    return int(name[1:]) - 1, string.ascii_lowercase.index(name[0])


def _neighbour(cell: Cell, move: str) -> Cell:
    return cell[0] + STEPS[move][0], cell[1] + STEPS[move][1]


def _neighbours(cell: Cell) -> Iterator[Cell]:
    return (_neighbour(cell, move) for move in STEPS)
