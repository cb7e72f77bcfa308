"""Episodes that a solver plays, with mistakes on purpose: rows from which an expert learns the way from every state.

    task ── solver's action, or now and then one that the solver takes elsewhere ──▶ environment ──▶ observation ── ...
            weight 1           weight 0: read, not learned

An expert that has seen only right moves is as lost as its student after the first wrong one. So mistakes lead the episode
off the way, the solver goes on from there, and only its own actions are learned.
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
"""Tasks whose right actions are the mistakes of all episodes: enough to find most actions, few enough to take no time."""


class SolvedEnvironment(Environment, Protocol):
    """An environment that knows what is right."""

    def solve(self) -> Action:
        """Return the action that an expert takes in the present state."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class PlaySettings:
    """Settings by which episodes are played."""

    mistakes: float = 0.3
    """Share of the turns that are drawn from what the solver does elsewhere; some of it cannot be done here, and that, too, an
    expert has to get out of."""
    blind: bool = False
    """Draw every turn from what the solver does elsewhere, and have it learned: the play of one who knows how a move is
    written and nothing else. It is what an expert by reinforcement begins with."""
    max_turns: int = 40
    """An episode that is not over after so many turns ends there."""
    seed: int = 0
    """The first task's; each further one's is the next number."""


def play_tasks(environment: str, tasks: Sequence[Task], play: PlaySettings) -> list[dict[str, Any]]:
    """Return each task as a row with its episode in `messages`; the same rows for the same arguments.

    `environment` is a name or an import path. Raises: ConfigError for an environment without a solver, a share that is
    none, or tasks of another environment.
    """
    _check_environment(environment, play)
    environment_class = find_environment(environment, "environment")
    if not callable(getattr(environment_class, "solve", None)):
        raise ConfigError.at(
            f"environment `{environment}`",
            found="no method `solve`",
            wanted="an environment that says what is right in every state",
            fix="take one of `opd environments list` that has a solver, or add `solve` to yours",
        )
    actions = {action.text: action for task in tasks[:POOL] for action in _play_episode(environment_class(), task, play, ())[0]}
    return [
        _build_row(environment_class, task, tuple(actions.values()), replace(play, seed=play.seed + i)) for i, task in enumerate(tasks)
    ]


def _check_environment(environment: str, play: PlaySettings) -> None:
    if not 0 <= play.mistakes < 1 or play.max_turns < 1:
        raise ConfigError.at(
            f"environment `{environment}`",
            found=f"mistakes {play.mistakes:g}, max_turns {play.max_turns}",
            wanted="a share of mistakes from 0 to below 1, and at least one turn",
            fix="for example mistakes 0.3 and max_turns 40",
        )


def _build_row(environment_class: Any, task: Task, mistakes: Sequence[Action], play: PlaySettings) -> dict[str, Any]:
    """Return the task with an episode of mistakes, or without any if they used up all tries; and the tools, if there are some."""
    environment = environment_class()
    tools = [tool.schema() for tool in environment.tools]
    _, turns = _play_episode(environment, task, play, mistakes)
    if not any(turn.get("weight") for turn in turns):
        _, turns = _play_episode(environment_class(), task, play, ())
    return {**task, "messages": turns} | ({"tools": tools} if tools else {})


def _play_episode(
    environment: SolvedEnvironment, task: Task, play: PlaySettings, mistakes: Sequence[Action]
) -> tuple[list[Action], list[Turn]]:
    """Return the actions and the messages of one episode; mistakes are drawn from `mistakes`, without which there are none."""
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
    """Return the messages of the first observation; none if there is nothing to read beside the prompt."""
    if isinstance(observation, str):
        return [{"role": "user", "content": observation}] if observation else []
    return [dict(message) for message in observation]


def _observation_turns(observation: str | tuple[str, ...]) -> list[Turn]:
    """Return one message, or one for the result of each call."""
    if isinstance(observation, str):
        return [{"role": "user", "content": observation}]
    return [{"role": "tool", "content": result} for result in observation]


def _to_last_turn(turns: Iterable[Turn]) -> list[Turn]:
    """Return the turns up to the policy's last one: it never reads what stands after that."""
    kept_turns = list(turns)
    while kept_turns and kept_turns[-1]["role"] != "assistant":
        kept_turns.pop()
    return kept_turns
