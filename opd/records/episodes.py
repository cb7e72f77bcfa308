"""Records of episodes: the result of one, the counts over those of a domain, and what a step's record says of them."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Self, get_args

from opd.records.guard import GuardRecord, GuardStats
from opd.records.json_fields import make_record
from opd.records.sums import Sums
from opd.records.types import Broken, Rollout, StopReason, TurnStats

BROKEN: frozenset[str] = frozenset(get_args(Broken))
"""Stop reasons of episodes that broke."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Audit(Sums):
    """Counts over one or many episodes, which tell what became of the sampled tokens."""

    segments: int = 0
    turns: int = 0
    sampled: int = 0
    """Tokens that the policy sampled."""
    trained: int = 0
    """Those of them that carry loss."""
    forks: int = 0
    """Segments that were begun because a history did not continue any other."""
    lost_turns: int = 0
    """Turns that were sampled, at least in part, and are in no segment."""
    teacher_turns: int = 0
    """Turns that the domain's expert wrote in the policy's place; `turns` counts them too."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeResult:
    """Outcome of one episode: its segments, why it ended, what it earned."""

    rollouts: tuple[Rollout, ...]
    """Its segments; none if it broke before the first turn."""
    stop_reason: StopReason
    reward: float | None
    audit: Audit
    invalid_calls: int = 0
    """Turns with a tool call that could not be made as it was written."""
    error: str = ""
    """Error that broke it."""
    close_error: str = ""
    """Reason why its environment, or the first of its sub-agents' environments, could not be closed. The episode's own end counts all the
    same."""
    text: str = ""
    """The turns as text, for people."""
    guard: GuardStats | None = None
    """Counts of the guard; None without a guard."""
    sub_agents: Mapping[str, int] = field(default_factory=dict)
    """Reason why sub-agents ended -> how many. `refused`: calls that started no sub-agent."""
    sub_agent_error: str = ""
    """Error of the first sub-agent that broke."""


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
    """Reason why episodes ended -> how many."""
    error: str = ""
    """Error of the first episode that broke."""
    not_closed: int = 0
    """Episodes with an environment that could not be closed."""
    close_error: str = ""
    """Reason why the first such environment could not be closed."""
    guard: GuardStats | None = None
    """Counts of the guard; None without a guard. The target log keeps them, so that a replay asks no judge."""
    sub_agents: Mapping[str, int] = field(default_factory=dict)
    """Sum of `EpisodeResult.sub_agents`."""
    sub_agent_error: str = ""
    """Error of the first sub-agent that broke."""

    @property
    def broken(self) -> int:
        """Episodes that ended because an environment or an agent's program failed."""
        return sum(num for reason, num in self.stop_reasons.items() if reason in BROKEN)

    @classmethod
    def from_results(cls, results: Iterable[EpisodeResult]) -> Self:
        """Add up the results of these episodes; of errors the first is kept."""
        episode_results = list(results)
        return cls(
            episodes=len(episode_results),
            audit=sum((r.audit for r in episode_results), Audit()),
            invalid_calls=sum(r.invalid_calls for r in episode_results),
            rewarded=sum(r.reward is not None for r in episode_results),
            reward_sum=math.fsum(r.reward for r in episode_results if r.reward is not None),
            stop_reasons=dict(Counter(r.stop_reason for r in episode_results)),
            error=next((r.error for r in episode_results if r.error), ""),
            not_closed=sum(bool(r.close_error) for r in episode_results),
            close_error=next((r.close_error for r in episode_results if r.close_error), ""),
            guard=GuardStats.sum_stats(r.guard for r in episode_results),
            sub_agents=dict(sum((Counter(r.sub_agents) for r in episode_results), Counter())),
            sub_agent_error=next((r.sub_agent_error for r in episode_results if r.sub_agent_error), ""),
        )

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Self:
        """Inverse of `dataclasses.asdict`."""
        return make_record(cls, data)


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnRecord:
    """Means over the trained tokens of a domain's episodes that were written in the same turn, nats."""

    tokens: int
    loss: float
    logprob_gap: float
    """|trainer - engine| log-prob, without stale tokens; 0 if all are stale."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodesRecord:
    """The episodes of one domain in one step."""

    episodes: int = 0
    turns: float = 0.0
    """Mean turns of an episode."""
    reward: float | None = None
    """Mean reward of an episode; an episode without a reward counts as 0, as in an exam. None if no episode has a reward."""
    tokens: int = 0
    """Tokens that the student sampled."""
    trained: float = 0.0
    """Share of them that carries loss."""
    segments: int = 0
    forks: int = 0
    """Segments that were begun because a history did not continue any other."""
    lost_turns: int = 0
    """Turns that were sampled, at least in part, and are in no segment."""
    teacher_turns: int = 0
    """Turns that the domain's expert wrote in the student's place."""
    invalid_calls: int = 0
    """Turns with a tool call that could not be made as it was written."""
    stop_reasons: Mapping[str, int] = field(default_factory=dict)
    """Reason why episodes ended -> how many."""
    broken: int = 0
    """Episodes that ended because an environment or an agent's program failed."""
    error: str = ""
    """Error of the first episode that broke; if none did, of the first sub-agent that broke."""
    not_closed: int = 0
    """Episodes with an environment whose `close` failed; their own end counts all the same. The JSON lacks the key if it is 0."""
    close_error: str = ""
    """Reason why the first such environment could not be closed."""
    sub_agents: Mapping[str, int] = field(default_factory=dict)
    """Reason why sub-agents ended -> how many. `refused`: calls that started no sub-agent. The JSON lacks the key if there were none."""
    by_turn: tuple[TurnRecord, ...] = ()
    """A record for the first turn of the dialogues, the second, and so on; turns are counted on in the segments after a summary."""
    guard: GuardRecord | None = None
    """Counts of the guard; None without a guard."""

    @classmethod
    def from_stats(cls, stats: EpisodeStats, turns: Mapping[int, TurnStats]) -> Self:
        """Make the record from a domain's counts. `turns`: number of a turn -> its sums; turns without trained tokens are missing."""
        audit = stats.audit
        return cls(
            episodes=stats.episodes,
            turns=audit.turns / max(1, stats.episodes),
            reward=stats.reward_sum / stats.episodes if stats.rewarded else None,
            tokens=audit.sampled,
            trained=audit.trained / max(1, audit.sampled),
            segments=audit.segments,
            forks=audit.forks,
            lost_turns=audit.lost_turns,
            teacher_turns=audit.teacher_turns,
            invalid_calls=stats.invalid_calls,
            stop_reasons=dict(stats.stop_reasons),
            broken=stats.broken,
            error=stats.error or stats.sub_agent_error,
            not_closed=stats.not_closed,
            close_error=stats.close_error,
            sub_agents=dict(stats.sub_agents),
            by_turn=tuple(_make_turn_record(turns.get(turn)) for turn in range(max(turns, default=-1) + 1)),
            guard=None if stats.guard is None else GuardRecord.from_stats(stats.guard),
        )

    def to_json(self) -> dict[str, Any]:
        """Return name -> value of the fields; those that few episodes have are left out if they are empty."""
        optional_fields = ("sub_agents", "guard", "teacher_turns", "not_closed", "close_error")
        return {name: value for name, value in asdict(self).items() if value or name not in optional_fields}


def _make_turn_record(stats: TurnStats | None) -> TurnRecord:
    if stats is None:
        return TurnRecord(tokens=0, loss=0.0, logprob_gap=0.0)
    gap = stats.gap_sum / max(1, stats.tokens - stats.stale_tokens)
    return TurnRecord(tokens=stats.tokens, loss=stats.kl_sum / stats.tokens, logprob_gap=gap)
