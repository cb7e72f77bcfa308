"""Kinds of sub-agents: tools that start an episode of their own. `delegation` starts them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from opd.config.sub_agents import ANSWER, TASK
from opd.records.environments import Tool

REFUSED = "refused"
"""Counted beside the stop reasons of sub-agents: a call that started none, because there were as many as an episode may start,
or the environment that they share was over."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SubAgentOptions:
    """Options of one kind of sub-agent; `opd.config.sub_agents.SubAgentConfig` explains what has no words here."""

    description: str
    domain: str = ""
    """Domain whose experts score it; empty: that of the agent that calls it."""
    system: str = ""
    prompt: str = TASK
    result: str = ANSWER
    shares: bool = False
    """Whether it acts on the environment of the agent that calls it."""
    environment: str = ""
    """Class of an environment of its own; empty: it has none."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Keyword arguments of that class."""
    step_timeout_s: float = 30.0
    """Deadline of each call of that environment."""
    max_turns: int = 16
    max_tokens: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SubAgentsOptions:
    """The sub-agents that an agent may start, itself or through them."""

    kinds: Mapping[str, SubAgentOptions]
    """Name of the tool -> what it starts."""
    at_most: int
    """How many in all."""
    depth: int = 1
    """1: sub-agents start none themselves."""

    @property
    def tools(self) -> tuple[Tool, ...]:
        """Tools by which the policy starts sub-agents."""
        task = {"type": "string", "description": "What to do, with everything that one has to know for it."}
        parameters = {"type": "object", "properties": {"task": task}, "required": ["task"]}
        return tuple(
            Tool(name=name, description=kind.description, parameters=parameters) for name, kind in self.kinds.items()
        )

    @property
    def domains(self) -> frozenset[str]:
        """Domains whose experts score sub-agents, where they are named."""
        return frozenset(kind.domain for kind in self.kinds.values() if kind.domain)

    def nested_options(self, at_most: int) -> SubAgentsOptions | None:
        """Return the options for what one of the sub-agents may start in turn; None if it may start nothing."""
        return replace(self, at_most=at_most, depth=self.depth - 1) if self.depth > 1 and at_most else None
