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
Chosen = TypeVar("Chosen", bound=Strict)
R = TypeVar("R", bound=Mapping[str, Any])
DRAWS_PER_ROW = 50
"""Tasks that are drawn at most for each row that is asked for, since some are alike or have too few or too many moves."""
MOST_MOVES = 1000
"""The most moves of a solution. No game here needs as many."""


class TaskRow(TypedDict):
    """One line of a prompts file."""

    prompt: str | list[dict[str, str]]
    answer: str
    metadata: dict[str, Any]


class FormOptions(Strict):
    """Options of every environment that can be told in two forms."""

    form: Literal["characters", "chat"] = "characters"
    """`characters`: short lines for a tokenizer of single characters; `chat`: words and messages."""


class GameOptions(FormOptions):
    """Options of every game's tasks."""

    min_moves: int = Field(1, ge=1)
    """Only tasks whose solution has at least as many moves."""
    max_moves: int = Field(MOST_MOVES, ge=1)
    """Only tasks whose solution has at most as many moves."""


def take_unique(drawn: Iterable[R], count: int, setting: str) -> list[R]:
    """Return the first `count` rows whose prompts all differ; `drawn` must be finite.

    Raises: ConfigError if `drawn` ends before that.
    """
    rows: dict[str, R] = {}
    for row in drawn:
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
    options: tuple[type[Chosen], Mapping[str, Any]],
    draw: Callable[[random.Random, Chosen, int], Iterator[TaskRow]],
    n: int,
    seed: int,
) -> list[TaskRow]:
    """Return `n` rows of the environment `name` with different prompts, the same for the same arguments.

    `options` are the class of the options and the keywords that the user gave. `draw` gets a random generator, the options, and the most
    rows that it may yield. Raises: ConfigError for options that do not fit, or if there are fewer such tasks.
    """
    setting = f"environment {name}"
    chosen = validate_section(options[0], options[1], setting)
    return take_unique(draw(random.Random(f"{name}/{seed}"), chosen, n * DRAWS_PER_ROW), n, setting)


class Game(ABC, Generic[State]):
    """An environment. A subclass says what a state is, which moves there are, and which one is best."""

    name: ClassVar[str]
    Options: ClassVar[type[GameOptions]] = GameOptions
    tools: tuple[Tool, ...] = ()
    pattern: ClassVar[str]
    """Regular expression of a move. The last match in the text of a turn is its move."""
    moves: ClassVar[str]
    """The moves, or examples of them, as the form `characters` names them after a text that is no move."""

    def __init__(self) -> None:
        self.task: Mapping[str, Any] = {}
        self.state: State
        self._invalid = self._steps = 0

    @classmethod
    @abstractmethod
    def draw(cls, rng: random.Random, options: Any) -> dict[str, Any]:
        """Return a task as plain JSON: what `begin` needs."""

    @abstractmethod
    def begin(self, task: Mapping[str, Any]) -> State:
        """Return the first state of a task. Raises: KeyError, TypeError, ValueError, if it is none."""

    @abstractmethod
    def rules(self) -> str:
        """Return the rules in words; the last sentence says how to write a move."""

    @abstractmethod
    def show(self, state: State) -> str:
        """Return the state in a few characters."""

    @abstractmethod
    def tell(self, state: State) -> str:
        """Return the state in words."""

    @abstractmethod
    def solved(self, state: State) -> bool:
        """Return True if the state is the end of the game."""

    @abstractmethod
    def problem(self, state: State, move: str) -> str:
        """Return the reason why the move is not possible, as a sentence; empty if it is."""

    @abstractmethod
    def after(self, state: State, move: str) -> State:
        """Return the state that a possible move leads to."""

    @abstractmethod
    def best(self, state: State) -> str:
        """Return a move that leads nearer to the end, from any state that is not the end."""

    def board(self) -> str:
        """Return the text that the prompt shows beside the first state."""
        return ""

    def reset(self, metadata: Mapping[str, Any], seed: int) -> str:
        """Begin a task, and return an empty observation, since the prompt has told everything. `seed` is not used. Raises: PromptError
        for metadata that is no task of this game."""
        self._start(metadata)
        return ""

    def step(self, action: Action) -> Outcome:
        """Make the move, if the text names one that is possible; the reward is 1 at the end."""
        self._steps += 1
        move = self.read(action.text)
        problem = "That is no move." if move is None else self.problem(self.state, move)
        if move is None or problem:
            self._invalid += 1
            return Outcome(observation=self._render_refusal(problem), info=self._describe_moves())
        self.state = self.after(self.state, move)
        if self.solved(self.state):
            return Outcome(reward=1.0, done=True, info=self._describe_moves())
        return Outcome(observation=self._render_state(), info=self._describe_moves())

    def close(self) -> None:
        """Do nothing, since nothing is held."""

    def solve(self) -> Action:
        """Return the action of an expert in the present state."""
        return Action(text=self.best(self.state))

    def read(self, text: str) -> str | None:
        """Return the last move that a text names; None if it names none."""
        moves = re.findall(self.pattern, text, re.IGNORECASE)
        return moves[-1].lower() if moves else None

    def solution(self) -> list[str]:
        """Return the best moves from the present state to the end."""
        state, moves = self.state, list[str]()
        while not self.solved(state):
            assert len(moves) < MOST_MOVES, f"{self.name} is not solved from {self.state}"
            moves.append(self.best(state))
            state = self.after(state, moves[-1])
        return moves

    @classmethod
    def tasks(cls, n: int, seed: int, **options: Any) -> list[TaskRow]:
        """Return `n` rows with different prompts, the same for the same arguments. `answer` has a solution's moves,
        `metadata.moves` their number.

        Raises: ConfigError for options that do not fit, or if there are fewer such tasks.
        """
        return draw_tasks(cls.name, (cls.Options, options), cls._draw_rows, n, seed)

    @classmethod
    def _draw_rows(cls, rng: random.Random, options: GameOptions, limit: int) -> Iterator[TaskRow]:
        """Draw `limit` tasks, and yield the rows of those whose solution has as many moves as the options want."""
        for _ in range(limit):
            game, task = cls(), {"game": cls.name, "form": options.form} | cls.draw(rng, options)
            game._start(task)
            moves = game.solution()
            if options.min_moves <= len(moves) <= options.max_moves:
                metadata = task | {"moves": len(moves)}
                yield {"prompt": game._render_prompt(), "answer": " ".join(moves), "metadata": metadata}

    def _start(self, metadata: Mapping[str, Any]) -> None:
        """Set task and state. Raises: PromptError."""
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
            return f"{self.name}{self.board()} {self._render_state()}"
        parts = filter(None, (self.rules(), self.board(), self._render_state()))
        return [{"role": "user", "content": "\n".join(parts)}]

    def _render_state(self) -> str:
        return f"{self.show(self.state)}=" if self.task["form"] == "characters" else self.tell(self.state)

    def _render_refusal(self, problem: str) -> str:
        """Return the observation after a move that is not possible: the rules again, and where the player is."""
        if self.task["form"] == "characters":
            return f"no, {self.moves}: {self._render_state()}"
        return f"{problem} {self.rules()}\n{self._render_state()}"

    def _describe_moves(self) -> dict[str, Any]:
        """Return the `info` of an outcome: turns so far, and how many of them were no possible move."""
        return {"steps": self._steps, "invalid": self._invalid}
