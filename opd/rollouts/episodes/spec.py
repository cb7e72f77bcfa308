"""Options, request and end of an episode; plain values that cross process boundaries."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import date
from typing import TYPE_CHECKING, Any

from opd.errors import RunError
from opd.records.episodes import BROKEN, EpisodeStats
from opd.records.types import Prompt, StopReason
from opd.rollouts.endpoint.options import AgentOptions
from opd.rollouts.episodes.compaction import CompactionOptions
from opd.rollouts.episodes.drift import Guide
from opd.rollouts.episodes.sub_agents import REFUSED, SubAgentsOptions
from opd.rollouts.episodes.trace import EpisodeKey
from opd.tool_formats import AUTO

if TYPE_CHECKING:
    from opd.guard.build import GuardSpec

LIMITS = frozenset({"turns", "curriculum", "tokens", "context"})
"""Stop reasons of an episode that did not end by itself."""

MAX_REWARD = 1e30
"""Largest reward. A larger one is a mistake, and a sum of such rewards could overflow."""


class EpisodeEnd(Exception):
    """The episode is over, for a reason that may be an error or not."""

    def __init__(self, reason: StopReason, error: str = "") -> None:
        super().__init__(reason, error)
        self.reason: StopReason = reason
        self.error = error


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeOptions:
    """Options for the episodes of one domain."""

    environment: str
    """Class of the environment, as `module:Class`. Empty for a sub-agent without an environment of its own."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Keyword arguments of the class."""
    max_turns: int
    max_tokens: int | None = None
    """Tokens that the policy may sample in an episode, sub-agents included; None: as many as the context holds."""
    max_turn_tokens: int
    """Tokens that the policy may sample in a turn."""
    step_timeout_s: float
    """Deadline of each call of the environment, in seconds."""
    max_broken: float
    """Largest share of a step's episodes that may break; one always may."""
    template_date: date | None = None
    """The day for a chat template that asks for a date."""
    tool_call_parser: str = AUTO
    """Form of the student's calls of tools, by a name of `opd.tool_formats`."""
    chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    """Variables for the student's chat template."""
    compaction: CompactionOptions | None = None
    """Settings by which an episode that grows long is summarised; None: it ends when the context is full."""
    guard: GuardSpec | None = None
    """The guard that checks the policy's calls before the environment gets them; None: nothing checks them."""
    sub_agents: SubAgentsOptions | None = None
    """Tools that start an episode of their own; None: there are none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeRequest:
    """One episode to run."""

    prompt: Prompt
    sample: EpisodeKey
    options: EpisodeOptions | AgentOptions
    seed: int
    """The run's seed. With the sample's id and the number of a turn it gives the turn's seed, with the prompt's id the environment's."""
    masked: frozenset[int] = frozenset()
    """Token ids that carry no loss where the policy writes them."""
    cut_after: int | None = None
    """Number of turns after which the curriculum ends the episode; None: only `max_turns` limits it."""
    guide: Guide | None = None
    """The expert that writes some of the turns; None: the policy writes all."""
    masked_by_domain: Mapping[str, frozenset[int]] = field(default_factory=dict)
    """Domain -> the same for sub-agents that the experts of that domain score."""


def is_reward(value: Any) -> bool:
    """Return True if this is a number that can be a reward."""
    # NaN fails the comparison, and so does an int that is too large for a float.
    return isinstance(value, int | float) and abs(value) <= MAX_REWARD


def refuse_many_broken(domain: str, stats: EpisodeStats, max_share: float) -> None:
    """Refuse a step in which too many episodes broke. Raises: RunError if more than the share `max_share` of a domain's episodes broke,
    or of their sub-agents; one may always break."""
    started = {reason: num for reason, num in stats.sub_agents.items() if reason != REFUSED}
    for unit, ends, error in (
        ("episodes", stats.stop_reasons, stats.error),
        ("sub-agents", started, stats.sub_agent_error),
    ):
        total = stats.episodes if unit == "episodes" else sum(started.values())
        bad = {reason: num for reason, num in ends.items() if reason in BROKEN}
        if sum(bad.values()) > max(1, max_share * total):
            reasons = ", ".join(f"{num} {reason}" for reason, num in bad.items())
            raise RunError(
                f"domain {domain}: {sum(bad.values())} of {total} {unit} broke ({reasons}), first: {error}; "
                f"max_broken of domains.{domain} is {max_share:g}"
            )
