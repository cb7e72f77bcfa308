"""Tasks with tools for a real instruct model. SmolLM2-135M-Instruct learns them from a few hundred episodes.

    calculator   Work out 595-901*309.                  calculate(expression)           2 turns
    lookup       What is the city of the boss of Ann?   look_up(name, field)            2 or 3 turns
    boxes        Now: cup: red ... Wanted: cup: blue    move(thing, box)                2 or 3 turns

Prompts are chat messages. After a wrong call a tool returns an error or a result that does not help; after a wrong answer the
agent gets a hint and may go on. As in `experts.suites.agents`, a row is a task with an episode of the environment's solver. In
a fifth of the turns the solver does something that belongs to another task, so that episodes show how to recover.
"""

from __future__ import annotations

from typing import Any

from experts.episodes.play import PlaySettings
from experts.suites.agents import AgentDomain, play_games

MISTAKES = 0.2
"""Probability that the solver makes a mistake in a turn."""

DOMAINS: dict[str, AgentDomain] = {
    "calculator": AgentDomain(options={"form": "chat", "terms": 3, "digits": 3}, max_turns=6),
    "lookup": AgentDomain(options={"hops": 2}, max_turns=6, tasks=1000, held_out=100),
    "boxes": AgentDomain(options={"things": 3, "moves": 2}, max_turns=6),
}
"""Each domain has the name of its environment."""


def make_rows(domain: str, count: int, seed: int) -> list[dict[str, Any]]:
    """Return `count` rows, the same for the same arguments. Prompts come again only when all tasks of the domain were used."""
    settings = PlaySettings(mistakes=MISTAKES, max_turns=DOMAINS[domain].max_turns, seed=seed)
    return play_games(domain, DOMAINS[domain], count, settings)
