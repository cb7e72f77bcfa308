"""Options of sub-agents, which are tools that start an episode of their own. `delegation` starts them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from opd.config.sub_agents import ANSWER, TASK
from opd.records.environments import Tool

REFUSED = "refused"
"""Key that is counted beside the stop reasons of sub-agents: a call that started none, because the episode had started as many as it
may, or because the shared environment was over."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SubAgentOptions:
    """Options of one kind of sub-agent; `opd.config.sub_agents.SubAgentConfig` explains the fields without a docstring."""

    description: str
    domain: str = ""
    """Domain whose experts score the sub-agent; empty: the domain of the agent that calls it."""
    system: str = ""
    prompt: str = TASK
    result: str = ANSWER
    shares: bool = False
    """True if the sub-agent acts on the environment of the agent that calls it."""
    environment: str = ""
    """Class of its own environment, as `module:Class`; empty: it has none."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Keyword arguments of that class."""
    step_timeout_s: float = 30.0
    """Deadline of each call of that environment, in seconds."""
    max_turns: int = 16
    max_tokens: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SubAgentsOptions:
    """The sub-agents that an agent may start, itself or through other sub-agents."""

    kinds: Mapping[str, SubAgentOptions]
    """Name of the tool -> the kind of sub-agent that it starts."""
    at_most: int
    """Largest number of sub-agents in all."""
    depth: int = 1
    """Levels of sub-agents; 1: sub-agents start none themselves."""

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
        """Return the options by which one of the sub-agents may start at most so many of its own; None if it may start none."""
        return replace(self, at_most=at_most, depth=self.depth - 1) if self.depth > 1 and at_most else None
