"""Records that a policy and its environment hand each other. Your own environment needs to import only this file."""

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
        """Return the tool in the form of chat templates and OpenAI's API."""
        function = {"name": self.name, "description": self.description, "parameters": dict(self.parameters)}
        return {"type": "function", "function": function}


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCall:
    """One tool call of the policy. The tool exists in the environment, and the arguments fit its schema."""

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
    """Result that an environment returns for an action."""

    observation: str | tuple[str, ...] = ""
    """Text that the policy reads next, or one text for each call of the action. After the last turn nobody reads it."""
    reward: float | None = None
    """Reward of the turn. An episode's reward is the sum over its turns; it has none if no turn has one."""
    done: bool = False
    """True if the episode ends here."""
    info: Mapping[str, Any] = field(default_factory=dict)
    """Anything worth a look in the trace, as plain JSON."""
