"""What a step's record says of its episodes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, Self

from opd.guard.events import GuardRecord
from opd.json_fields import known
from opd.types import TurnStats

if TYPE_CHECKING:
    from opd.rollouts.episodes.spec import EpisodeStats


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnRecord:
    """The trained tokens of one turn of a domain's episodes; means a token, nats."""

    tokens: int
    loss: float
    logprob_gap: float
    """|trainer - engine| log-prob, without stale tokens; 0 if all are stale."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodesRecord:
    """One domain's episodes."""

    episodes: int = 0
    turns: float = 0.0
    """Mean turns of an episode."""
    reward: float | None = None
    """Mean of an episode; one without a reward counts as 0, as in an exam. None if no episode has one."""
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
    """Why the episodes ended -> how many."""
    broken: int = 0
    """Episodes that ended because an environment or an agent's program failed."""
    error: str = ""
    """What broke the first that broke, else the first sub-agent that broke."""
    not_closed: int = 0
    """Episodes with an environment whose `close` failed; not there if none did. They count as they ended."""
    close_error: str = ""
    """Why the first could not be closed."""
    sub_agents: Mapping[str, int] = field(default_factory=dict)
    """Why sub-agents ended -> how many; not there without any. `refused`: calls that started none."""
    by_turn: tuple[TurnRecord, ...] = ()
    """The first turn of a dialogue, the second, and so on, also in the segments after a summary."""
    guard: GuardRecord | None = None
    """What the guard saw; None where none looks on."""

    @classmethod
    def of(cls, stats: EpisodeStats, turns: Mapping[int, TurnStats]) -> Self:
        """Make the record from a domain's counts; `turns` are those with a trained token."""
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
            by_turn=tuple(_turn(turns.get(turn)) for turn in range(max(turns, default=-1) + 1)),
            guard=None if stats.guard is None else GuardRecord.of(stats.guard),
        )

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Self:
        """Inverse of `to_json`; keys of a newer release are ignored."""
        read = known(cls, data)
        guard = GuardRecord.from_json(read["guard"]) if read.get("guard") else None
        turns = tuple(TurnRecord(**known(TurnRecord, turn)) for turn in read.get("by_turn", ()))
        return cls(**read | {"by_turn": turns, "guard": guard})

    def to_json(self) -> dict[str, Any]:
        """The fields that these episodes have, by name."""
        seldom = ("sub_agents", "guard", "teacher_turns", "not_closed", "close_error")
        return {name: value for name, value in asdict(self).items() if value or name not in seldom}


def _turn(stats: TurnStats | None) -> TurnRecord:
    if stats is None:
        return TurnRecord(tokens=0, loss=0.0, logprob_gap=0.0)
    gap = stats.gap_sum / max(1, stats.tokens - stats.stale_tokens)
    return TurnRecord(tokens=stats.tokens, loss=stats.kl_sum / stats.tokens, logprob_gap=gap)
