"""Play episodes with a solver that makes mistakes on purpose: rows from which an expert learns what to do in every state.

    task ── solver's action, or sometimes a right action of another task ──▶ environment ──▶ observation ── ...
            weight 1           weight 0: read, not learned

An expert that has seen only right moves does not know what to do after a wrong one, which its student will make. So mistakes
lead the episode astray, the solver goes on from there, and only its own actions are learned.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from opd.environments import find_environment
from opd.errors import ConfigError
from opd.interfaces import Environment
from opd.records.environments import Action

Task = Mapping[str, Any]
"""A row of a prompts file that the environment's `tasks` made."""
Turn = dict[str, Any]
POOL = 100
"""Number of tasks from which mistakes are collected: a right action of one task is a mistake in another. They are enough to
find most actions, and few enough to take no time."""


class SolvedEnvironment(Environment, Protocol):
    """An environment with a solver."""

    def solve(self) -> Action:
        """Return the action that an expert takes in the present state."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class PlaySettings:
    """Settings by which episodes are played."""

    mistakes: float = 0.3
    """Share of the turns that are mistakes: right actions of other tasks. Some of them are not possible in the present state;
    an expert has to recover from these too."""
    blind: bool = False
    """Draw every turn from the actions of other tasks, and give it the weight 1. Such episodes teach how a move is written and
    nothing else, which is what reinforcement begins with."""
    max_turns: int = 40
    """Most turns of an episode; one that is not over by then is cut."""
    seed: int = 0
    """Seed of the first task; each further task has the next number."""


def play_tasks(environment: str, tasks: Sequence[Task], play: PlaySettings) -> list[dict[str, Any]]:
    """Return each task as a row with its episode in `messages`; the same rows for the same arguments.

    `environment` is a name or an import path. Raises: ConfigError for an environment without a solver, settings out of
    range, or tasks of another environment.
    """
    if not 0 <= play.mistakes < 1 or play.max_turns < 1:
        raise ConfigError.at(
            f"environment `{environment}`",
            found=f"mistakes {play.mistakes:g}, max_turns {play.max_turns}",
            wanted="a share of mistakes from 0 to below 1, and at least one turn",
            fix="for example mistakes 0.3 and max_turns 40",
        )
    environment_class = find_environment(environment, "environment")
    if not callable(getattr(environment_class, "solve", None)):
        raise ConfigError.at(
            f"environment `{environment}`",
            found="no method `solve`",
            wanted="an environment that says what is right in every state",
            fix="take one of `opd environments list` that has a solver, or add `solve` to yours",
        )
    actions = {
        action.text: action for task in tasks[:POOL] for action in _play_episode(environment_class(), task, play, ())[0]
    }
    return [
        _build_row(environment_class, task, tuple(actions.values()), replace(play, seed=play.seed + i))
        for i, task in enumerate(tasks)
    ]


def _build_row(environment_class: Any, task: Task, mistakes: Sequence[Action], play: PlaySettings) -> dict[str, Any]:
    """Return the task with an episode, and with the environment's tools if it has some.

    If the episode consists of mistakes only, there is nothing to learn, so it is played again without mistakes.
    """
    environment = environment_class()
    tools = [tool.schema() for tool in environment.tools]
    _, turns = _play_episode(environment, task, play, mistakes)
    if not any(turn.get("weight") for turn in turns):
        _, turns = _play_episode(environment_class(), task, play, ())
    return {**task, "messages": turns} | ({"tools": tools} if tools else {})


def _play_episode(
    environment: SolvedEnvironment, task: Task, play: PlaySettings, mistakes: Sequence[Action]
) -> tuple[list[Action], list[Turn]]:
    """Return the actions and the messages of one episode. `mistakes`: actions to draw mistakes from; if empty, none are made."""
    rng = random.Random(f"episode/{play.seed}")
    actions: list[Action] = []
    turns: list[Turn] = []
    try:
        turns += _first_turns(environment.reset(task["metadata"], rng.getrandbits(32)))
        while len(actions) < play.max_turns:
            right = environment.solve()
            is_mistake = bool(mistakes) and (play.blind or rng.random() < play.mistakes)
            actions.append(rng.choice(mistakes) if is_mistake else right)
            weight = int(play.blind or actions[-1].text == right.text)
            turns.append({"role": "assistant", "content": actions[-1].text, "weight": weight})
            outcome = environment.step(actions[-1])
            if outcome.done:
                break
            turns += _observation_turns(outcome.observation)
    finally:
        environment.close()
    return actions, _to_last_turn(turns)


def _first_turns(observation: str | Sequence[Mapping[str, str]]) -> list[Turn]:
    """Return the messages of the first observation; none if the environment shows nothing besides the prompt."""
    if isinstance(observation, str):
        return [{"role": "user", "content": observation}] if observation else []
    return [dict(message) for message in observation]


def _observation_turns(observation: str | tuple[str, ...]) -> list[Turn]:
    """Return an observation as one message, or as one message for the result of each call."""
    if isinstance(observation, str):
        return [{"role": "user", "content": observation}]
    return [{"role": "tool", "content": result} for result in observation]


def _to_last_turn(turns: Iterable[Turn]) -> list[Turn]:
    """Return the messages up to the policy's last turn; the policy never reads the later ones."""
    kept_turns = list(turns)
    while kept_turns and kept_turns[-1]["role"] != "assistant":
        kept_turns.pop()
    return kept_turns
