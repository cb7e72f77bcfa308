"""Games of many turns that a character model of 0.8 million parameters learns in a few minutes.

    hanoi     hanoi aabca=     bc   aacca=   ...    the Towers of Hanoi with five disks, up to 31 moves
    maze      maze b a1d4=     r    b1d4=    ...    one of two mazes that the prompt does not show
    sorting   sorting 514320=  1    154320=  ...    digits into order by swaps of neighbours
    number    number 4:90=     47   48:90=   ...    guess a number; each answer tells the range that is left

A row is a task of an environment together with an episode, in `messages`, that the environment's solver plays with mistakes
on purpose. A merge and its exams use the prompt and the metadata, the training of experts uses the messages.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import cycle, islice
from typing import Any

from experts.episodes.play import PlaySettings, play_tasks
from opd.environments import find_environment


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentDomain:
    """Tasks of one environment, and how long they are played."""

    options: Mapping[str, Any] = field(default_factory=dict)
    """Options of the environment that decide on its tasks."""
    max_turns: int
    """Most turns of an episode. A solver needs fewer, but mistakes take turns too."""
    tasks: int = 20000
    """Most different tasks; some domains have few states."""
    held_out: int = 200
    """The first `held_out` tasks come only once. If more rows than tasks are asked for, the other tasks come again."""


DOMAINS: dict[str, AgentDomain] = {
    "hanoi": AgentDomain(options={"disks": 5}, max_turns=48, tasks=242, held_out=100),
    "maze": AgentDomain(options={"size": 7, "mazes": 2}, max_turns=40, tasks=1600),
    "sorting": AgentDomain(options={"digits": 6}, max_turns=32),
    "number": AgentDomain(options={"highest": 99}, max_turns=8, tasks=3000),
}
"""Each domain has the name of its environment."""


def make_rows(domain: str, count: int, seed: int) -> list[dict[str, Any]]:
    """Return `count` rows, the same for the same arguments. Prompts come again only when all tasks of the domain were used."""
    return play_games(domain, DOMAINS[domain], count, PlaySettings(max_turns=DOMAINS[domain].max_turns, seed=seed))


def play_games(environment: str, domain: AgentDomain, count: int, settings: PlaySettings) -> list[dict[str, Any]]:
    """Return `count` rows of an environment's tasks, each with an episode."""
    tasks = find_environment(environment, "domain").tasks(min(count, domain.tasks), settings.seed, **domain.options)
    repeated = islice(cycle(tasks[domain.held_out :]), count - len(tasks))
    return play_tasks(environment, [*tasks, *repeated], settings)
