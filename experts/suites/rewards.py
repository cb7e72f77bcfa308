"""Tasks without a reference answer: several answers are right, and a verifier or a game decides.

Four have one turn, in which any of the right answers will do:

    between   btw 23:35=    29        a number between the two
    ascend    asc 39174=    379       three of the digits, in ascending order
    beside    adj hxk=      g         a letter that stands next to one of these in the alphabet
    avoid     not 3917=     028       three different digits, none of these

Two are games of several turns, which end with the reward: `sorting` and `number` of `opd.environments`.

The `completion`, or the turns of a game, are blind attempts: they have the form of an answer and are right only by chance. A
base that has learned them succeeds sometimes, and reinforcement needs no more to begin with.
"""

from __future__ import annotations

import random
import string
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from experts.episodes.play import PlaySettings
from experts.suites.agents import AgentDomain, play_games
from opd.environments.game import take_unique

DRAWS_PER_ROW = 50
LETTERS = string.ascii_lowercase
ASCENDING, AVOIDING = 3, 3
VERIFIER = "experts.suites.rewards:judge"
"""Name of the verifier of the domains with one turn, for a pipeline: `{kind: python, function: ...}`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Skill:
    """One domain with one turn."""

    code: str
    draw: Callable[[random.Random], str]
    """Draws a task."""
    guess: Callable[[random.Random, str], str]
    """Makes an attempt at this task that has the form of an answer, but is right only by chance."""
    right: Callable[[str, str], bool]
    """Returns True if a text (second argument) is a right answer to a task (first argument)."""
    tasks: int = 20000
    """Most different tasks; if more are asked for, only so many are made."""


def judge(text: str, answer: str, metadata: Mapping[str, Any]) -> float:
    """Return 1 if the text is one of the right answers, else 0. This is the verifier of the domains with one turn."""
    return float(SKILLS[metadata["domain"]].right(metadata["task"], text.strip()))


def make_rows(domain: str, count: int, seed: int) -> list[dict[str, Any]]:
    """Return `count` rows, or as many as there are different tasks; the same for the same arguments."""
    if domain in GAMES:
        game = GAMES[domain]
        return play_games(domain, game, count, PlaySettings(max_turns=game.max_turns, seed=seed, blind=True))
    num = min(count, SKILLS[domain].tasks)
    return take_unique(_draw(domain, num * DRAWS_PER_ROW, seed), num, f"suite rewards, domain {domain}")


def _draw(domain: str, limit: int, seed: int) -> Iterator[dict[str, Any]]:
    rng, skill = random.Random(f"rewards/{domain}/{seed}"), SKILLS[domain]
    for _ in range(limit):
        task = skill.draw(rng)
        yield {
            "prompt": f"{skill.code} {task}=",
            "completion": skill.guess(rng, task),
            "metadata": {"suite": "rewards", "domain": domain, "task": task},
        }


def _sample_range(rng: random.Random) -> str:
    width = rng.randint(4, 16)
    low = rng.randint(0, 99 - width)
    return f"{low}:{low + width}"


def _is_between(task: str, text: str) -> bool:
    low, high = map(int, task.split(":"))
    return text.isascii() and text.isdigit() and len(text) <= 2 and low < int(text) < high


def _is_ascending(task: str, text: str) -> bool:
    return len(text) == ASCENDING and set(text) <= set(task) and all(a < b for a, b in pairwise(text))


def _is_neighbour(task: str, text: str) -> bool:
    return len(text) == 1 and any(
        text == LETTERS[(LETTERS.index(letter) + way) % 26] for letter in task for way in (-1, 1)
    )


def _avoids_digits(task: str, text: str) -> bool:
    return len(text) == len(set(text)) == AVOIDING and set(text) <= set(string.digits) - set(task)


def _sample_signs(rng: random.Random, signs: str, count: int) -> str:
    return "".join(rng.sample(signs, count))


SKILLS: dict[str, Skill] = {
    "between": Skill(
        code="btw",
        draw=_sample_range,
        guess=lambda rng, task: str(rng.randrange(100)),
        right=_is_between,
        tasks=1100,
    ),
    "ascend": Skill(
        code="asc",
        draw=lambda rng: _sample_signs(rng, string.digits, 5),
        guess=lambda rng, task: _sample_signs(rng, task, ASCENDING),
        right=_is_ascending,
    ),
    "beside": Skill(
        code="adj",
        draw=lambda rng: _sample_signs(rng, LETTERS, 3),
        guess=lambda rng, task: rng.choice(LETTERS),
        right=_is_neighbour,
    ),
    "avoid": Skill(
        code="not",
        draw=lambda rng: _sample_signs(rng, string.digits, 4),
        guess=lambda rng, task: _sample_signs(rng, string.digits, AVOIDING),
        right=_avoids_digits,
    ),
}
GAMES: dict[str, AgentDomain] = {
    "sorting": AgentDomain(options={"digits": 4}, max_turns=10, tasks=4000),
    "number": AgentDomain(options={"highest": 30}, max_turns=7, tasks=360, held_out=100),
}
"""Each has the name of its environment."""
DOMAINS: dict[str, object] = {**SKILLS, **GAMES}
