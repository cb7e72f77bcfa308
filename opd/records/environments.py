"""Records that a policy and its environment hand each other. Light: an environment of yours imports this file and nothing else."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Tool:
    """One function that the policy can call."""

    name: str
    description: str
    parameters: Mapping[str, Any] = field(default_factory=lambda: {"type": "object", "properties": {}})
    """JSON schema of the arguments: an object with `properties` and `required`."""

    def schema(self) -> dict[str, Any]:
        """The tool as chat templates and OpenAI's API spell it."""
        function = {"name": self.name, "description": self.description, "parameters": dict(self.parameters)}
        return {"type": "function", "function": function}


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCall:
    """One call that the policy wrote, and that names a tool of its environment with arguments that fit its schema."""

    name: str
    arguments: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Action:
    """One turn of the policy."""

    text: str
    """The turn without special tokens, calls included."""
    calls: tuple[ToolCall, ...] = ()
    """The calls in it, in order; empty for an environment without tools."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """Answer of an environment to an action."""

    observation: str | tuple[str, ...] = ""
    """What the policy reads next: a text, or one text for each call of the action. After the last turn nobody reads it."""
    reward: float | None = None
    """What the turn earned; an episode's reward is the sum over its turns, or none where no turn has one."""
    done: bool = False
    """True if the episode ends here."""
    info: Mapping[str, Any] = field(default_factory=dict)
    """Anything worth a look in the trace, as plain JSON."""
