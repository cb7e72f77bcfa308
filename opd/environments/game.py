"""Games of one player that can be won from every state, whatever mistakes led there.

A game is a few small functions of its state; this file makes an environment of them. What the player reads has two forms:

    characters   `hanoi aab=`, the player writes `bc`, reads `aac=`, ...   for a tokenizer of single characters
    chat         the rules in words, then one message for each move        for a model with a chat template

Both are played alike: the text of a turn is the move. A text that is no move costs a turn, and then the player reads the rules again.
"""

from __future__ import annotations

import json
import random
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, ClassVar, Generic, Literal, TypedDict, TypeVar

from pydantic import Field

from opd.errors import ConfigError, PromptError
from opd.records.environments import Action, Outcome, Tool
from opd.settings.strict import Strict
from opd.settings.yaml_files import validate_section

State = TypeVar("State")
TaskOptions = TypeVar("TaskOptions", bound=Strict)
Row = TypeVar("Row", bound=Mapping[str, Any])
DRAWS_PER_ROW = 50
"""The most tasks that are drawn for each row that is asked for. Some are dropped: equal ones, and those with too few or too many moves."""
MOST_MOVES = 1000
"""The most moves of a solution. No game here needs as many."""


class TaskRow(TypedDict):
    """One line of a prompts file."""

    prompt: str | list[dict[str, str]]
    answer: str
    metadata: dict[str, Any]


class FormOptions(Strict):
    """Options of every environment that has the two forms `characters` and `chat`."""

    form: Literal["characters", "chat"] = "characters"
    """`characters`: short lines for a tokenizer of single characters; `chat`: words and messages."""


class GameOptions(FormOptions):
    """Options of every game's tasks."""

    min_moves: int = Field(1, ge=1)
    """Only tasks whose solution has at least as many moves."""
    max_moves: int = Field(MOST_MOVES, ge=1)
    """Only tasks whose solution has at most as many moves."""


def take_unique(candidates: Iterable[Row], count: int, setting: str) -> list[Row]:
    """Return the first `count` rows whose prompts all differ. `candidates` must end: it may repeat prompts for ever otherwise.

    `setting` is named in the error. Raises: ConfigError if there are fewer different prompts.
    """
    rows: dict[str, Row] = {}
    for row in candidates:
        if len(rows) == count:
            break
        rows.setdefault(json.dumps(row["prompt"]), row)
    if len(rows) < count:
        raise ConfigError.at(
            setting,
            found=f"only {len(rows)} different prompts",
            wanted=f"{count} of them",
            fix="ask for fewer rows",
        )
    return list(rows.values())


def make_metadata_error(name: str, problem: str, wanted: str) -> PromptError:
    """Return the error for a row whose metadata is no task of the environment `name`."""
    fix = f"make the prompts with `opd environments tasks {name}`"
    return PromptError.at(f"environment {name}: metadata", found=problem, wanted=wanted, fix=fix)


def draw_tasks(
    name: str,
    options_class: type[TaskOptions],
    keywords: Mapping[str, Any],
    draw_rows: Callable[[random.Random, TaskOptions, int], Iterator[TaskRow]],
    n: int,
    seed: int,
) -> list[TaskRow]:
    """Return `n` rows of the environment `name` with different prompts, the same for the same arguments.

    `keywords` are the options that the user set, which `options_class` checks. `draw_rows` gets a random generator, the options, and the
    most rows that it may yield. Raises: ConfigError for options that do not fit, or if there are fewer such tasks.
    """
    setting = f"environment {name}"
    options = validate_section(options_class, keywords, setting)
    return take_unique(draw_rows(random.Random(f"{name}/{seed}"), options, n * DRAWS_PER_ROW), n, setting)


class Game(ABC, Generic[State]):
    """An environment. A subclass has a type of states, and a method for each thing that a game needs: draw a task, make its first state,
    render a state in each of the two forms, refuse and apply a move, choose the best one."""

    name: ClassVar[str]
    Options: ClassVar[type[GameOptions]] = GameOptions
    tools: tuple[Tool, ...] = ()
    move_pattern: ClassVar[str]
    """Regular expression of a move. The last match in the text of a turn is its move."""
    move_examples: ClassVar[str]
    """Moves, or words for them, which the player reads in the form `characters` after a text that is no move."""

    def __init__(self) -> None:
        self.task: Mapping[str, Any] = {}
        self.state: State
        self._turns = 0
        self._invalid_turns = 0

    @classmethod
    @abstractmethod
    def draw_task(cls, rng: random.Random, options: Any) -> dict[str, Any]:
        """Return a task as plain JSON: what `begin` needs."""

    @abstractmethod
    def begin(self, task: Mapping[str, Any]) -> State:
        """Return the first state of a task. Raises: KeyError, TypeError, ValueError or IndexError for metadata that is no task."""

    @abstractmethod
    def render_rules(self) -> str:
        """Return the rules in words; the last sentence says how to write a move."""

    @abstractmethod
    def render_characters(self, state: State) -> str:
        """Return the state in a few characters, for the form `characters`."""

    @abstractmethod
    def render_words(self, state: State) -> str:
        """Return the state in words, for the form `chat`."""

    @abstractmethod
    def is_solved(self, state: State) -> bool:
        """Return True if the state is the end of the game."""

    @abstractmethod
    def explain_impossible_move(self, state: State, move: str) -> str:
        """Return a sentence with the reason why the move is not possible; empty for a possible move."""

    @abstractmethod
    def apply_move(self, state: State, move: str) -> State:
        """Return the state that a possible move leads to."""

    @abstractmethod
    def choose_best_move(self, state: State) -> str:
        """Return a move that leads nearer to the end, from any state that is not the end."""

    def render_board(self) -> str:
        """Return the text that the prompt shows beside the first state, such as a map; empty if the game needs none."""
        return ""

    def reset(self, metadata: Mapping[str, Any], seed: int) -> str:
        """Begin a task, and return an empty observation, since the prompt has told everything. `seed` is not used: the metadata have all
        of a task. Raises: PromptError for metadata that is no task of this game."""
        self._begin_task(metadata)
        return ""

    def step(self, action: Action) -> Outcome:
        """Make the move, if the text names one that is possible; the reward is 1 at the end."""
        self._turns += 1
        move = self.parse_move(action.text)
        if move is None:
            return self._refuse_move("That is no move.")
        problem = self.explain_impossible_move(self.state, move)
        if problem:
            return self._refuse_move(problem)
        self.state = self.apply_move(self.state, move)
        if self.is_solved(self.state):
            return Outcome(reward=1.0, done=True, info=self._count_turns())
        return Outcome(observation=self._render_state(), info=self._count_turns())

    def close(self) -> None:
        """Do nothing, since nothing is held."""

    def solve(self) -> Action:
        """Return the action of an expert in the present state."""
        return Action(text=self.choose_best_move(self.state))

    def parse_move(self, text: str) -> str | None:
        """Return the last move that a text names; None if it names none."""
        moves = re.findall(self.move_pattern, text, re.IGNORECASE)
        return moves[-1].lower() if moves else None

    def find_solution(self) -> list[str]:
        """Return the best moves from the present state to the end."""
        state, moves = self.state, list[str]()
        while not self.is_solved(state):
            assert len(moves) < MOST_MOVES, f"{self.name} is not solved from {self.state}"
            moves.append(self.choose_best_move(state))
            state = self.apply_move(state, moves[-1])
        return moves

    @classmethod
    def tasks(cls, n: int, seed: int, **options: Any) -> list[TaskRow]:
        """Return `n` rows with different prompts, the same for the same arguments. `answer` has a solution's moves,
        `metadata.moves` their number.

        Raises: ConfigError for options that do not fit, or if there are fewer such tasks.
        """
        return draw_tasks(cls.name, cls.Options, options, cls._draw_rows, n, seed)

    @classmethod
    def _draw_rows(cls, rng: random.Random, options: GameOptions, limit: int) -> Iterator[TaskRow]:
        """Draw `limit` tasks, and yield the rows of those whose solution has as many moves as the options want."""
        for _ in range(limit):
            game = cls()
            task = {"game": cls.name, "form": options.form} | cls.draw_task(rng, options)
            game._begin_task(task)
            moves = game.find_solution()
            if options.min_moves <= len(moves) <= options.max_moves:
                metadata = task | {"moves": len(moves)}
                yield {"prompt": game._render_prompt(), "answer": " ".join(moves), "metadata": metadata}

    def _begin_task(self, metadata: Mapping[str, Any]) -> None:
        """Set task and state. Raises: PromptError for metadata that is no task of this game."""
        self.task = metadata
        try:
            if metadata["game"] != self.name or metadata["form"] not in ("characters", "chat"):
                raise ValueError(f"game {metadata['game']!r:.40} in the form {metadata['form']!r:.40}")
            self.state = self.begin(metadata)
        except (KeyError, TypeError, ValueError, IndexError) as error:
            problem = f"{type(error).__name__}: {error}"
            raise make_metadata_error(self.name, problem, f"a task of {self.name}") from None

    def _render_prompt(self) -> str | list[dict[str, str]]:
        if self.task["form"] == "characters":
            return f"{self.name}{self.render_board()} {self._render_state()}"
        parts = filter(None, (self.render_rules(), self.render_board(), self._render_state()))
        return [{"role": "user", "content": "\n".join(parts)}]

    def _render_state(self) -> str:
        return (
            f"{self.render_characters(self.state)}="
            if self.task["form"] == "characters"
            else self.render_words(self.state)
        )

    def _refuse_move(self, problem: str) -> Outcome:
        """Count the turn as invalid, and return an outcome that repeats the rules and the state; `chat` also says the `problem`."""
        self._invalid_turns += 1
        if self.task["form"] == "characters":
            observation = f"no, {self.move_examples}: {self._render_state()}"
        else:
            observation = f"{problem} {self.render_rules()}\n{self._render_state()}"
        return Outcome(observation=observation, info=self._count_turns())

    def _count_turns(self) -> dict[str, Any]:
        """Return the `info` of an outcome: turns so far, and how many of them were no possible move."""
        return {"steps": self._turns, "invalid": self._invalid_turns}
