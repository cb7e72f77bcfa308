"""Facts that only a tool knows: who is whose boss, who lives where. A question takes one look-up after the other.

    question   What is the city of the boss of Ann?
    calls      boss of Ann -> Tom      city of Tom -> Oslo
    answer     Oslo

An answer is a turn without a call; its last word counts. A wrong one costs one of a few tries, a wrong look-up a turn.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator, Mapping
from typing import Any

from pydantic import Field

from opd.environments.game import TaskRow, draw_tasks, make_metadata_error
from opd.environments.question_game import Asking, Judgement, format_turn_with_call
from opd.records.environments import Action, Tool, ToolCall
from opd.settings.strict import Strict

_NAMES = (
    "Adam Alan Alice Amy Anna Ben Bill Bob Carl Chris Clara Dan David Diana Edward Emily Emma Eric Eva Frank Fred George Grace "
    "Harry Helen Henry Ian Jack James Jane Jim John Julia Karl Kate Kevin Laura Leo Linda Lisa Lucy Mark Martin Mary Mike "
    "Nancy Nick Oliver Oscar Paul Peter Ralph Rose Ruth Sam Sarah Simon Susan Tom Victor"
)
_CITIES = "Athens Berlin Boston Cairo Chicago Dallas Delhi Dublin London Madrid Milan Moscow Oslo Paris Rome Tokyo"
NAMES, CITIES = tuple(_NAMES.split()), tuple(_CITIES.split())
PEOPLE = ("boss", "doctor", "friend")
"""Fields whose value is another person, so that a question can go on from there."""
FIELDS = (*PEOPLE, "city", "room")
LISTED = 24
"""People of a task's table; look-ups of any other name find nobody."""
LOOK_UP = Tool(
    name="look_up",
    description="Look up one fact about one person.",
    parameters={
        "type": "object",
        "properties": {"name": {"type": "string"}, "field": {"type": "string", "enum": list(FIELDS)}},
        "required": ["name", "field"],
    },
)
Table = dict[str, dict[str, str]]
"""Name -> field -> value."""


class LookupOptions(Strict):
    hops: int = Field(2, ge=1, le=4)
    """Look-ups that a question takes at most, each of what the one before it gave."""


class Lookup(Asking):
    """Answer questions about people by looking up one fact after the other."""

    name = "lookup"
    Options = LookupOptions
    tools = (LOOK_UP,)

    def reset(self, metadata: Mapping[str, Any], seed: int) -> str:
        """Begin. Raises: PromptError for metadata whose question cannot be answered from its table."""
        try:
            self._table: Table = {str(name): dict(facts) for name, facts in metadata["table"].items()}
            self._steps = _look_up_path(self._table, str(metadata["start"]), metadata["path"])
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            wanted = "`start`, `path` and a `table` in which the path can be followed"
            raise make_metadata_error(self.name, f"{type(error).__name__}: {error}", wanted) from None
        self._past_lookups: set[tuple[str, str]] = set()
        return self._begin()

    def judge(self, text: str) -> Judgement:
        words = re.findall(r"\w+", text)
        right = bool(words) and words[-1].casefold() == self._steps[-1][2].casefold()
        return Judgement(right, "That is not right. Look up every step of the question, then answer.")

    def solve(self) -> Action:
        """Look up the first step that was not seen yet; answer once the last one was."""
        for name, field, _ in self._steps:
            if (name, field) not in self._past_lookups:
                return format_turn_with_call(LOOK_UP.name, {"name": name, "field": field})
        return Action(text=self._steps[-1][2])

    @classmethod
    def tasks(cls, n: int, seed: int, **options: Any) -> list[TaskRow]:
        """Return `n` rows with different prompts, the same for the same arguments. Raises: ConfigError."""
        return draw_tasks(cls.name, LookupOptions, options, _draw_questions, n, seed)

    def called(self, call: ToolCall) -> str:
        """Look up a fact."""
        name, field = str(call.arguments["name"]), str(call.arguments["field"])
        if name not in self._table:
            return f"error: there is nobody called {name}"
        self._past_lookups.add((name, field))
        return self._table[name][field]


def _look_up_path(table: Table, start: str, path: list[str]) -> list[tuple[str, str, str]]:
    """Return the name, field and value of every look-up. Raises: KeyError for a name or field that the table lacks, ValueError
    for no path."""
    lookups, name = list[tuple[str, str, str]](), start
    for field in path:
        lookups.append((name, field, str(table[name][field])))
        name = lookups[-1][2]
    if not lookups:
        raise ValueError("a path without a step")
    return lookups


def _draw_questions(rng: random.Random, options: LookupOptions, limit: int) -> Iterator[TaskRow]:
    for _ in range(limit):
        listed = rng.sample(NAMES, LISTED)
        table = {name: _draw_facts(rng, [person for person in listed if person != name]) for name in listed}
        path = [*rng.choices(PEOPLE, k=rng.randint(1, options.hops) - 1), rng.choice(FIELDS)]
        question = "".join(f"the {field} of " for field in reversed(path))
        word = "Who" if path[-1] in PEOPLE else "What"
        yield {
            "prompt": [{"role": "user", "content": f"{word} is {question}{listed[0]}? Answer with the result only."}],
            "answer": _look_up_path(table, listed[0], path)[-1][2],
            "metadata": {"start": listed[0], "path": path, "table": table, "moves": len(path) + 1},
        }


def _draw_facts(rng: random.Random, candidates: list[str]) -> dict[str, str]:
    people = {field: rng.choice(candidates) for field in PEOPLE}
    return people | {"city": rng.choice(CITIES), "room": str(rng.randint(10, 99))}
