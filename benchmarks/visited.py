"""States of a game that the episodes of a training run pass, for `benchmarks.drift --count-states`."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from opd.environments import find_environment
from opd.environments.game import Game
from opd.records.environments import Action, Outcome, Tool

OFTEN = 10
"""Turns in a state after which we say that it was seen often."""


class Visited:
    """One of our games that writes the state of every turn to a file. Implements `opd.interfaces.Environment`."""

    tools: tuple[Tool, ...] = ()

    def __init__(self, game: str, file: str) -> None:
        self._game = game_of(game)
        self._file = Path(file)
        self._start = ""

    def reset(self, metadata: Mapping[str, Any], seed: int) -> str:
        seen = self._game.reset(metadata, seed)
        self._start = self._game.render_characters(self._game.state)
        return seen

    def step(self, action: Action) -> Outcome:
        with self._file.open("a", encoding="utf-8") as file:  # one short line: those of other threads stay whole
            file.write(f"{self._start} {self._game.render_characters(self._game.state)}\n")
        return self._game.step(action)

    def close(self) -> None:
        self._game.close()


@dataclass(frozen=True, slots=True, kw_only=True)
class States:
    """States that a training run saw."""

    turns: int
    different: int
    often: int
    """Different states that it saw `OFTEN` times or more."""
    on_the_way: float
    """Share of the states on the right ways of the exam's tasks that it saw often."""


def game_of(name: str) -> Game[Any]:
    """A new game by its name."""
    game = find_environment(name, "--environment")()
    assert isinstance(game, Game)
    return game


def states_seen(game: str, visited: Path, tasks: Path, exam: Path) -> States:
    """Counts of `visited`, without the episodes of exams: those that begin at none of the training's tasks."""
    starts = {states[0] for states in right_ways(game, tasks)}
    lines = [line.split(" ") for line in visited.read_text(encoding="utf-8").splitlines()]
    counts = Counter(state for start, state in lines if start in starts)
    often = {state for state, count in counts.items() if count >= OFTEN}
    wanted = {state for states in right_ways(game, exam) for state in states}
    return States(
        turns=counts.total(), different=len(counts), often=len(often), on_the_way=len(wanted & often) / len(wanted)
    )


def right_ways(game: str, tasks: Path) -> list[list[str]]:
    """For each task of a file the states of its right way, without the end."""
    ways = []
    for line in tasks.read_text(encoding="utf-8").splitlines():
        played = game_of(game)
        played.reset(json.loads(line)["metadata"], seed=0)
        states = []
        for move in played.find_solution():
            states.append(played.render_characters(played.state))
            played.state = played.apply_move(played.state, move)
        ways.append(states)
    return ways
