"""A maze of up to 8 x 8 cells: walk to the goal.

A step into a wall leaves the player where he is, and the goal can be reached from every free cell.
"""

from __future__ import annotations

import random
import string
from collections.abc import Iterator, Mapping
from typing import Any

from pydantic import Field

from opd.environments.game import Game, GameOptions

Cell = tuple[int, int]
"""Row and column, from 0 at the top left."""
STEPS: dict[str, Cell] = {"u": (-1, 0), "d": (1, 0), "l": (0, -1), "r": (0, 1)}
WORDS = {"u": "up", "d": "down", "l": "left", "r": "right"}
LOOP_CHANCE = 0.1
"""The chance that a wall between two free cells is opened, so that there may be two ways to a goal."""


class MazeOptions(GameOptions):
    size: int = Field(5, ge=3, le=8)
    """Rows and columns."""
    mazes: int = Field(0, ge=0, le=26)
    """0: every task has a maze of its own, which the prompt shows. More: all tasks, whatever their seed, are in this many mazes,
    called a to z, which the prompt does not show: the player has to learn them."""


class Maze(Game[Cell]):
    """Find the way through a maze of up to 8 x 8 cells."""

    name = "maze"
    Options = MazeOptions
    move_pattern = r"\b(up|down|left|right|[udlr])\b"
    move_examples = "u d l r"

    @classmethod
    def draw_task(cls, rng: random.Random, options: MazeOptions) -> dict[str, Any]:
        number = rng.randrange(options.mazes) if options.mazes else None
        # A maze that is to be learned is made from its number alone, so that it is the same under every seed.
        carving_rng = rng if number is None else random.Random(f"maze/{options.size}/{number}")
        free = carve_maze(carving_rng, options.size)
        start, goal = rng.sample(sorted(free), 2)
        indices = range(options.size)
        return {
            "cells": ["".join("." if (row, column) in free else "+" for column in indices) for row in indices],
            "start": format_cell(start),
            "goal": format_cell(goal),
            "maze": "" if number is None else string.ascii_lowercase[number],
        }

    def begin(self, task: Mapping[str, Any]) -> Cell:
        self._free = {
            (row, column)
            for row, line in enumerate(task["cells"])
            for column, character in enumerate(line)
            if character == "."
        }
        self._goal, start = parse_cell(task["goal"]), parse_cell(task["start"])
        self._distances = compute_distances(self._goal, self._free)
        if start not in self._distances:
            raise ValueError(f"no way from {task['start']} to {task['goal']}")
        return start

    def render_board(self) -> str:
        maze = self.task["maze"]
        if not maze:
            return "\n" + "\n".join(self.task["cells"]) + "\n"
        return f" {maze}" if self.task["form"] == "characters" else f"This is maze {maze}."

    def render_rules(self) -> str:
        return (
            "You walk through a maze. Rows are numbers from the top, columns are letters from the left, + is a wall. "
            "Answer with one step: up, down, left or right."
        )

    def render_characters(self, state: Cell) -> str:
        return f"{format_cell(state)}{self.task['goal']}"

    def render_words(self, state: Cell) -> str:
        directions = ", ".join(WORDS[move] for move in STEPS if _apply_step(state, move) in self._free)
        return f"You are at {format_cell(state)}, the goal is {self.task['goal']}. Free: {directions}."

    def parse_move(self, text: str) -> str | None:
        move = super().parse_move(text)  # a word or its first letter
        return None if move is None else move[0]

    def is_solved(self, state: Cell) -> bool:
        return state == self._goal

    def explain_impossible_move(self, state: Cell, move: str) -> str:
        return (
            "" if _apply_step(state, move) in self._free else f"There is a wall {WORDS[move]} of {format_cell(state)}."
        )

    def apply_move(self, state: Cell, move: str) -> Cell:
        return _apply_step(state, move)

    def choose_best_move(self, state: Cell) -> str:
        wall_distance = len(self._free)  # more than any cell's, so that no wall is chosen
        return min(STEPS, key=lambda move: self._distances.get(_apply_step(state, move), wall_distance))


def carve_maze(rng: random.Random, size: int) -> set[Cell]:
    """Return the free cells of a random maze: ways one cell wide and a few loops, with a way from each cell to each other one.

    A trail grows at random into cells that touch no other free cell, and goes back where there is none. Then some walls between
    two free cells are opened.
    """
    cells = {(row, column) for row in range(size) for column in range(size)}
    trail = [rng.choice(sorted(cells))]
    free = set(trail)
    while trail:
        next_cells = [c for c in _list_neighbours(trail[-1]) if c in cells - free and _count_neighbours(c, free) == 1]
        if next_cells:
            trail.append(rng.choice(next_cells))
            free.add(trail[-1])
        else:
            trail.pop()
    walls = sorted(c for c in cells - free if _count_neighbours(c, free) == 2)
    return free | {cell for cell in walls if rng.random() < LOOP_CHANCE}


def compute_distances(goal: Cell, free: set[Cell]) -> dict[Cell, int]:
    """Return cell -> number of steps to the goal, for every cell from which there is a way."""
    distances, queue = {goal: 0}, [goal]
    for cell in queue:  # it grows meanwhile, nearer cells first
        for neighbour in _list_neighbours(cell):
            if neighbour in free and neighbour not in distances:
                distances[neighbour] = distances[cell] + 1
                queue.append(neighbour)
    return distances


def format_cell(cell: Cell) -> str:
    """Return a cell as players write it: b3 is the second column of the third row."""
    return f"{string.ascii_lowercase[cell[1]]}{cell[0] + 1}"


def parse_cell(name: str) -> Cell:
    """Inverse of `format_cell`. Raises: ValueError, IndexError."""
    return int(name[1:]) - 1, string.ascii_lowercase.index(name[0])


def _apply_step(cell: Cell, move: str) -> Cell:
    return cell[0] + STEPS[move][0], cell[1] + STEPS[move][1]


def _list_neighbours(cell: Cell) -> Iterator[Cell]:
    return (_apply_step(cell, move) for move in STEPS)


def _count_neighbours(cell: Cell, free: set[Cell]) -> int:
    return sum(neighbour in free for neighbour in _list_neighbours(cell))
