"""Games: their solvers win from every state, also from those that only mistakes lead to, and text that is no move costs a turn."""

from __future__ import annotations

import json
import random
from itertools import product
from typing import Any

import pytest

from experts.suites.letters import CHARACTERS
from opd.environments.game import Game
from opd.environments.hanoi import Hanoi
from opd.environments.maze import Maze, carve_maze, compute_distances, format_cell, parse_cell
from opd.environments.number import GuessTheNumber
from opd.environments.sorting import Sorting
from opd.errors import ConfigError, PromptError
from opd.records.environments import Action

GAMES: list[tuple[type[Game[Any]], dict[str, Any]]] = [
    (Maze, {"size": 8}),
    (Maze, {"size": 8, "mazes": 2}),
    (Maze, {"size": 3}),
    (Hanoi, {"disks": 4}),
    (GuessTheNumber, {"highest": 30}),
    (Sorting, {}),
]
GUESSES = {
    "maze": ["u", "d", "l", "r"],
    "hanoi": ["ab", "ac", "ba", "bc", "ca", "cb", "aa"],
    "number": ["0", "7", "30", "99"],
    "sorting": list("0123456789"),
}
each_game = pytest.mark.parametrize(("kind", "options"), GAMES, ids=[f"{g.name}-{o}" for g, o in GAMES])


def started(kind: type[Game[Any]], row: Any) -> Game[Any]:
    game = kind()
    assert game.reset(json.loads(json.dumps(row["metadata"])), 0) == ""
    return game


@each_game
def test_the_solver_wins_from_wherever_a_clumsy_player_got_to(kind: type[Game[Any]], options: dict[str, Any]) -> None:
    rng = random.Random(3)
    for row in kind.tasks(6, 1, **options):
        game = started(kind, row)
        for _ in range(rng.randint(1, 25)):
            if game.step(Action(text=rng.choice(GUESSES[kind.name]))).done:
                game = started(kind, row)
        needed = len(game.find_solution())
        for turn in range(1, needed + 1):
            outcome = game.step(game.solve())
            assert outcome.info["invalid"] <= outcome.info["steps"]
            assert outcome.done == (turn == needed), f"{kind.name}: {game.state}"
        assert outcome.reward == 1


@each_game
def test_each_best_move_is_one_nearer(kind: type[Game[Any]], options: dict[str, Any]) -> None:
    """Else a player who slips once in a while might never arrive."""
    row = kind.tasks(1, 5, **options)[0]
    game = started(kind, row)
    assert len(game.find_solution()) == row["metadata"]["moves"] and " ".join(game.find_solution()) == row["answer"]
    while not game.is_solved(game.state):
        before = len(game.find_solution())
        game.state = game.apply_move(game.state, game.choose_best_move(game.state))
        assert len(game.find_solution()) == before - 1


@each_game
def test_text_that_is_no_move_tells_the_rules_again(kind: type[Game[Any]], options: dict[str, Any]) -> None:
    for form in ("characters", "chat"):
        game = started(kind, kind.tasks(1, 0, **options, form=form)[0])
        state = game.state
        outcome = game.step(Action(text="I do not know!"))
        assert not outcome.done and outcome.reward is None and outcome.info == {"steps": 1, "invalid": 1}
        assert game.state == state
        told = game.move_examples if form == "characters" else game.render_rules()
        assert told in outcome.observation
        assert (
            game.render_characters(state) if form == "characters" else game.render_words(state)
        ) in outcome.observation


@each_game
def test_characters_are_those_of_the_tiny_tokenizer(kind: type[Game[Any]], options: dict[str, Any]) -> None:
    rng = random.Random(0)
    for row in kind.tasks(3, 0, **options):
        game, texts = started(kind, row), [row["prompt"], row["answer"]]
        for _ in range(8):
            seen = game.step(Action(text=rng.choice([*GUESSES[kind.name], "what"]))).observation
            assert isinstance(seen, str)
            texts += [seen, game.solve().text] if not game.is_solved(game.state) else []
            if game.is_solved(game.state):
                break
        assert set("".join(texts)) <= set(CHARACTERS)
        assert all(text.endswith("=") and len(text) <= 60 for text in texts[2::2])


@each_game
def test_tasks_are_the_same_for_the_same_seed(kind: type[Game[Any]], options: dict[str, Any]) -> None:
    rows = kind.tasks(5, 7, **options)
    assert rows == kind.tasks(5, 7, **options) != kind.tasks(5, 8, **options)
    assert rows == json.loads(json.dumps(rows)) and len({json.dumps(row["prompt"]) for row in rows}) == 5
    chat = kind.tasks(2, 7, **options, form="chat")
    assert all(row["prompt"][0]["role"] == "user" for row in chat)


def test_only_tasks_of_the_wanted_length() -> None:
    rows = Maze.tasks(10, 0, size=8, min_moves=8, max_moves=26)
    assert all(8 <= row["metadata"]["moves"] <= 26 for row in rows)
    assert max(row["metadata"]["moves"] for row in Maze.tasks(100, 0, size=8)) >= 18


def test_too_many_tasks_and_unknown_options_are_refused() -> None:
    with pytest.raises(ConfigError, match="only 8 different prompts"):
        Hanoi.tasks(9, 0, disks=2)
    with pytest.raises(ConfigError, match=r"(?s)environment maze: sise.*did you mean `size`"):
        Maze.tasks(1, 0, sise=3)
    with pytest.raises(ConfigError, match="environment maze: size"):
        Maze.tasks(1, 0, size=9)


@pytest.mark.parametrize(
    "metadata",
    [
        {},
        {"game": "hanoi", "form": "characters", "start": "aab"},
        {"game": "maze", "form": "loud"},
        {"game": "maze", "form": "chat", "cells": [".+.", "+++", "..."], "start": "a1", "goal": "a3", "maze": ""},
        {"game": "maze", "form": "chat", "cells": ["..."], "start": "?", "goal": "a1", "maze": ""},
    ],
)
def test_metadata_of_another_kind_is_refused_by_name(metadata: dict[str, Any]) -> None:
    with pytest.raises(PromptError, match=r"(?s)environment maze: metadata.*opd environments tasks maze"):
        Maze().reset(metadata, 0)


@pytest.mark.parametrize(
    ("kind", "text", "move"),
    [
        (Maze, "I go up, then left", "l"),
        (Maze, "Right.", "r"),
        (Hanoi, "Move the disk: AC", "ac"),
        (GuessTheNumber, "Is it 50, or rather 62?", "62"),
        (GuessTheNumber, "12345", None),
        (Sorting, "place 3", "3"),
        (Sorting, "none", None),
    ],
)
def test_moves_are_found_in_words(kind: type[Game[Any]], text: str, move: str | None) -> None:
    assert kind().parse_move(text) == move


def test_a_maze_has_a_way_between_all_its_cells() -> None:
    for seed, size in product(range(5), (3, 5, 8)):
        free = carve_maze(random.Random(seed), size)
        assert len(compute_distances(min(free), free)) == len(free) >= size
    assert all(parse_cell(format_cell(cell)) == cell for cell in carve_maze(random.Random(0), 8))


def test_mazes_that_are_learned_are_the_same_under_every_seed_and_not_shown() -> None:
    cells = {
        (row["metadata"]["maze"], tuple(row["metadata"]["cells"]))
        for seed in (0, 1)
        for row in Maze.tasks(20, seed, size=6, mazes=2)
    }
    assert len(cells) == 2
    assert all("+" not in row["prompt"] for row in Maze.tasks(5, 0, mazes=2))


def test_hanoi_keeps_its_law_and_is_solved_in_the_fewest_moves() -> None:
    game = started(Hanoi, {"metadata": {"game": "hanoi", "form": "chat", "start": "aaa"}})
    assert len(game.find_solution()) == 7
    for move, why in (("ba", "no disk on peg b"), ("aa", "another peg")):
        assert why in str(game.step(Action(text=move)).observation)
    game.step(Action(text="ac"))
    assert "top disk of peg c is smaller" in str(game.step(Action(text="ac")).observation)


def test_a_guess_outside_of_the_range_tells_nothing_and_costs_nothing_but_a_turn() -> None:
    game = started(
        GuessTheNumber, {"metadata": {"game": "number", "form": "characters", "low": 4, "high": 9, "secret": 5}}
    )
    assert game.step(Action(text="99")).observation == "4:9="
    assert game.step(Action(text="7")).observation == "4:6="
    assert game.step(Action(text="5")).reward == 1
