"""Environments that only tests and benchmarks use."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from typing import Any

from opd.records.environments import Action, Outcome, Tool, ToolCall


class Sleeper:
    """A tool that waits, so that a benchmark can see whether the engine idles meanwhile; done after a few calls."""

    name = "sleeper"
    tools = (Tool(name="wait", description="Wait a moment."),)

    def __init__(self, seconds: float = 0.2, turns: int = 4) -> None:
        """`seconds` is how long each step takes, `turns` how many there are. Whether a turn calls the tool does not matter: a
        policy that learned nothing waits as often as one that can."""
        self._seconds, self._left = seconds, turns

    def reset(self, metadata: Mapping[str, Any], seed: int) -> str:
        return ""

    def step(self, action: Action) -> Outcome:
        time.sleep(self._seconds)
        self._left -= 1
        waited = tuple("waited=" for _ in action.calls) or "waited="
        return Outcome(observation=waited, reward=1.0 if not self._left else None, done=not self._left)

    def close(self) -> None:
        return

    def solve(self) -> Action:
        return Action(text="wait", calls=(ToolCall(name="wait", arguments={}),))

    @classmethod
    def tasks(cls, n: int, seed: int, **options: Any) -> Iterator[dict[str, Any]]:
        return ({"prompt": f"sleep {seed}:{i}=", "answer": "wait", "metadata": {}} for i in range(n))
