"""Things in boxes, to be moved by a tool until each is where it should be.

    task     The key is in the red box, the coin in the blue box. Put the key in the green box ...
    calls    move key to green -> key: green, coin: blue
    answer   Done.

A turn without a call says that all is done. If it is not, that costs one of a few tries. A wrong move can be mended by another.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from typing import Any

from pydantic import Field

from opd.environments.game import TaskRow, draw_tasks, make_metadata_error
from opd.environments.question_game import Asking, Judgement, format_turn_with_call
from opd.errors import PromptError
from opd.records.environments import Action, Tool, ToolCall
from opd.settings.strict import Strict

THINGS = ("book", "coin", "cup", "key", "pen", "ring")
BOXES = ("blue", "green", "red", "white")
DONE = "Done."
MOVE = Tool(
    name="move",
    description="Move one thing to a box.",
    parameters={
        "type": "object",
        "properties": {"thing": {"type": "string"}, "box": {"type": "string", "enum": list(BOXES)}},
        "required": ["thing", "box"],
    },
)
Places = dict[str, str]
"""Thing -> the box that it is in. The order is that in which a prompt tells them."""


class BoxesOptions(Strict):
    things: int = Field(3, ge=1, le=len(THINGS))
    """Things of a task; at least one of them is in the wrong box."""
    moves: int = Field(2, ge=1, le=len(THINGS))
    """Things that are in the wrong box, at most."""


class Boxes(Asking):
    """Move things until each is in the right box, and say when that is done."""

    name = "boxes"
    Options = BoxesOptions
    tools = (MOVE,)

    def reset(self, metadata: Mapping[str, Any], seed: int) -> str:
        """Begin. Raises: PromptError for metadata without places, or with other things before and after."""
        self._positions, self._goal = (_read_places(metadata, key) for key in ("start", "goal"))
        if not self._positions or self._positions.keys() != self._goal.keys():
            raise _make_metadata_error(f"things {', '.join(self._positions)} and {', '.join(self._goal)}")
        return self._begin()

    def judge(self, text: str) -> Judgement:
        return Judgement(self._positions == self._goal, f"That is not done yet. {_describe_places(self._positions)}")

    def solve(self) -> Action:
        """Move the first thing that is in the wrong box, whoever put it there; say so if there is none."""
        wrong = next((thing for thing, box in self._goal.items() if self._positions[thing] != box), None)
        if wrong is None:
            return Action(text=DONE)
        return format_turn_with_call(MOVE.name, {"thing": wrong, "box": self._goal[wrong]})

    @classmethod
    def tasks(cls, n: int, seed: int, **options: Any) -> list[TaskRow]:
        """Return `n` rows with different prompts, the same for the same arguments. Raises: ConfigError."""
        return draw_tasks(cls.name, BoxesOptions, options, _draw_rows, n, seed)

    def called(self, call: ToolCall) -> str:
        """Move a thing, and tell where everything is."""
        thing, box = str(call.arguments["thing"]), str(call.arguments["box"])
        if thing not in self._positions:
            return f"error: there is no {thing}. {_describe_places(self._positions)}"
        self._positions[thing] = box
        return _describe_places(self._positions)


def _describe_places(positions: Mapping[str, str]) -> str:
    return ", ".join(f"{thing}: {box}" for thing, box in positions.items())


def _read_places(metadata: Mapping[str, Any], key: str) -> Places:
    """Return the box of each thing. Raises: PromptError."""
    positions = metadata.get(key)
    if not isinstance(positions, Mapping) or any(box not in BOXES for box in positions.values()):
        raise _make_metadata_error(f"{key} = {positions!r:.60}")
    return dict(positions)


def _make_metadata_error(problem: str) -> PromptError:
    wanted = f"the same things in `start` and `goal`, each in one of the boxes {', '.join(BOXES)}"
    return make_metadata_error(Boxes.name, problem, wanted)


def _draw_rows(rng: random.Random, options: BoxesOptions, limit: int) -> Iterator[TaskRow]:
    for _ in range(limit):
        goal = {thing: rng.choice(BOXES) for thing in rng.sample(THINGS, options.things)}
        wrong = rng.sample(sorted(goal), rng.randint(1, min(options.moves, options.things)))
        start = goal | {thing: rng.choice([box for box in BOXES if box != goal[thing]]) for thing in wrong}
        request = f"Now: {_describe_places(start)}. Wanted: {_describe_places(goal)}. Move what is in the wrong box, then answer {DONE}"
        yield {
            "prompt": [{"role": "user", "content": request}],
            "answer": _describe_places(goal),
            "metadata": {"start": start, "goal": goal, "moves": len(wrong) + 1},
        }
