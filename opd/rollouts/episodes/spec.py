"""What goes into an episode and what comes out of it; plain values that cross process boundaries."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from datetime import date
from typing import TYPE_CHECKING, Any, Self, get_args

from opd.errors import RunError
from opd.guard.events import GuardStats
from opd.rollouts.endpoint.options import AgentOptions
from opd.rollouts.episodes.compaction import CompactionOptions
from opd.rollouts.episodes.drift import Guide
from opd.rollouts.episodes.sub_agents import REFUSED, SubAgentsOptions
from opd.rollouts.episodes.tool_formats import AUTO
from opd.rollouts.episodes.trace import Audit, Sample
from opd.types import Broken, Prompt, Rollout, StopReason

if TYPE_CHECKING:
    from opd.guard.build import GuardSpec

BROKEN: frozenset[str] = frozenset(get_args(Broken))
LIMITS = frozenset({"turns", "curriculum", "tokens", "context"})
"""Stop reasons of an episode that did not end by itself."""

MAX_REWARD = 1e30
"""More is a mistake, and a sum of such rewards could overflow."""


class EpisodeEnd(Exception):
    """The episode is over."""

    def __init__(self, reason: StopReason, error: str = "") -> None:
        super().__init__(reason, error)
        self.reason: StopReason = reason
        self.error = error


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeOptions:
    """How the episodes of one domain run."""

    environment: str
    """Its class, as `module:Class`. Empty for a sub-agent without an environment of its own."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Keyword arguments of the class."""
    max_turns: int
    max_tokens: int | None = None
    """Tokens that the policy may sample in an episode; None: as many as the context holds."""
    max_turn_tokens: int
    """Tokens that the policy may sample in a turn."""
    step_timeout_s: float
    """Deadline of each call of the environment."""
    max_broken: float
    """Largest share of a step's episodes that may break; one always may."""
    template_date: date | None = None
    """The day for a chat template that asks for a date."""
    tool_call_parser: str = AUTO
    """How the student writes calls of tools, by a name of `opd.rollouts.episodes.tool_formats`."""
    chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    """Variables for the student's chat template."""
    compaction: CompactionOptions | None = None
    """What is done about an episode that grows too long; None: it ends where the context does."""
    guard: GuardSpec | None = None
    """What checks the policy's calls before the environment gets them; None: nothing."""
    sub_agents: SubAgentsOptions | None = None
    """Tools that start an episode of their own; None: there are none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeRequest:
    """One episode to run."""

    prompt: Prompt
    sample: Sample
    options: EpisodeOptions | AgentOptions
    seed: int
    """The run's seed: with the sample and the number of a turn it decides what is sampled, with the prompt what the
    environment does."""
    masked: frozenset[int] = frozenset()
    """Token ids that carry no loss where the policy writes them."""
    cut_after: int | None = None
    """Turns after which the curriculum ends the episode; None: `max_turns` alone does."""
    guide: Guide | None = None
    """The expert that writes some of the turns; None: the policy writes all."""
    masked_by_domain: Mapping[str, frozenset[int]] = field(default_factory=dict)
    """The same for what sub-agents write and the experts of another domain score."""
    told: Callable[[EpisodeResult], None] | None = None
    """Within a worker: who gets the result as soon as the episode has ended."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeResult:
    """What came of one episode."""

    rollouts: tuple[Rollout, ...]
    """Its segments; none if it broke before the first turn."""
    stop_reason: StopReason
    reward: float | None
    audit: Audit
    invalid_calls: int = 0
    """Turns with a tool call that could not be made as it was written."""
    error: str = ""
    """What broke it."""
    close_error: str = ""
    """Why its environment could not be closed, or the first of its sub-agents'; the episode counts as it ended."""
    text: str = ""
    """The turns as text, for people."""
    guard: GuardStats | None = None
    """What the guard saw; None where none looked on."""
    sub_agents: Mapping[str, int] = field(default_factory=dict)
    """Why its sub-agents ended -> how many. `refused`: a call that started none."""
    sub_agent_error: str = ""
    """What broke the first sub-agent that broke."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeStats:
    """Counts over the episodes of one domain in a step or an exam."""

    episodes: int = 0
    audit: Audit = field(default_factory=Audit)
    invalid_calls: int = 0
    rewarded: int = 0
    """Episodes with a reward."""
    reward_sum: float = 0.0
    stop_reasons: Mapping[str, int] = field(default_factory=dict)
    """Why the episodes ended -> how many."""
    error: str = ""
    """What broke the first that broke."""
    not_closed: int = 0
    """Episodes with an environment that could not be closed."""
    close_error: str = ""
    """Why the first could not."""
    guard: GuardStats | None = None
    """What the guard saw; None where none looked on. The step's log has it, so that a replay asks no judge."""
    sub_agents: Mapping[str, int] = field(default_factory=dict)
    """Sum of `EpisodeResult.sub_agents`."""
    sub_agent_error: str = ""
    """What broke the first sub-agent that broke."""

    @property
    def broken(self) -> int:
        """Episodes that ended because an environment or an agent's program failed."""
        return sum(num for reason, num in self.stop_reasons.items() if reason in BROKEN)

    @classmethod
    def of(cls, results: Iterable[EpisodeResult]) -> Self:
        """Count what came of these episodes."""
        found = list(results)
        return cls(
            episodes=len(found),
            audit=sum((r.audit for r in found), Audit()),
            invalid_calls=sum(r.invalid_calls for r in found),
            rewarded=sum(r.reward is not None for r in found),
            reward_sum=math.fsum(r.reward for r in found if r.reward is not None),
            stop_reasons=dict(Counter(r.stop_reason for r in found)),
            error=next((r.error for r in found if r.error), ""),
            not_closed=sum(bool(r.close_error) for r in found),
            close_error=next((r.close_error for r in found if r.close_error), ""),
            guard=GuardStats.total(r.guard for r in found),
            sub_agents=dict(sum((Counter(r.sub_agents) for r in found), Counter())),
            sub_agent_error=next((r.sub_agent_error for r in found if r.sub_agent_error), ""),
        )

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Self:
        """Inverse of `dataclasses.asdict`."""
        guard = None if data.get("guard") is None else GuardStats.from_json(data["guard"])
        return cls(**{**data, "audit": Audit(**data["audit"]), "guard": guard})


def is_reward(value: Any) -> bool:
    """Whether this is a number that can be a reward."""
    # NaN is not, and an int may be too large for a float.
    return isinstance(value, int | float) and abs(value) <= MAX_REWARD


def refuse_many_broken(domain: str, stats: EpisodeStats, max_share: float) -> None:
    """Raises: RunError if more than `max_share` of a domain's episodes broke, or of their sub-agents; one always may."""
    started = {reason: num for reason, num in stats.sub_agents.items() if reason != REFUSED}
    for what, ends, error in (
        ("episodes", stats.stop_reasons, stats.error),
        ("sub-agents", started, stats.sub_agent_error),
    ):
        total = stats.episodes if what == "episodes" else sum(started.values())
        bad = {reason: num for reason, num in ends.items() if reason in BROKEN}
        if sum(bad.values()) > max(1, max_share * total):
            reasons = ", ".join(f"{num} {reason}" for reason, num in bad.items())
            raise RunError(
                f"domain {domain}: {sum(bad.values())} of {total} {what} broke ({reasons}), first: {error}; "
                f"max_broken of domains.{domain} is {max_share:g}"
            )
