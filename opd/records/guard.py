"""Records of the guard's verdicts, for episodes, the target log, the metrics and the report. They are plain values, as in JSON."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal, Self

from opd.records.sums import Sums

Stage = Literal["rules", "judge", "no_judge", "judge_failed"]
"""Source of the decision. `rules`: a rule that hit, or the fact that none did. `judge`: the judge. `no_judge`, `judge_failed`: the setting
`on_failure`, because there is no judge, or the judge did not answer."""
Suspicion = Literal["none", "rule", "certain", "unreadable", "answer"]
"""Finding of the rules. `none`: nothing. `rule`: a rule hit that asks for the judge. `certain`: a rule hit that needs no judge.
`unreadable`: the command does not parse. `answer`: nothing in an answer, which the judge reads all the same."""


STAGE_NAMES: dict[Stage, str] = {
    "rules": "the rules",
    "judge": "the judge",
    "no_judge": "on_failure, there is no judge",
    "judge_failed": "on_failure, the judge did not answer",
}
"""Source of the decision, in words."""
MAX_TEXT = 2000
MAX_EXAMPLE = 400
"""Most characters that are kept of a call's text in the target log (`MAX_TEXT`), and in the metrics (`MAX_EXAMPLE`)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """The guard's answer to one call, and all that the trace keeps of it."""

    allowed: bool
    """False: the call must not run."""
    stage: Stage
    suspicion: Suspicion
    rule: str = ""
    """The rule that hit, if one did."""
    reason: str = ""
    """Reason, for people."""
    command: str = ""
    """The calls that the command would make, one line each, with resolved words."""
    observation: str = ""
    """Text that the policy reads instead, if the call is blocked: the program's natural error."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GuardEvent:
    """One call, or one answer, that the rules did not simply let pass, and what became of it."""

    episode: str
    """Sample id of the episode."""
    turn: int
    """Number of the policy's turn in its conversation, from 0."""
    tool: str
    """Empty for an answer."""
    text: str
    """Text that the policy wrote: the call's arguments, or the answer."""
    verdict: Verdict

    @property
    def rule(self) -> str:
        """The rule that hit, or why no rule was needed: `unreadable`, `answer`."""
        return self.verdict.rule or self.verdict.suspicion

    @property
    def line(self) -> str:
        """The sentence that a reader of the episode gets."""
        decision = "let pass" if self.verdict.allowed else "blocked"
        return f"guard: {decision} by {STAGE_NAMES[self.verdict.stage]}, {self.rule}: {self.verdict.reason}"

    @property
    def describe(self) -> str:
        """`line` with the number of the turn, from 1, and the call."""
        return f"turn {self.turn + 1}, {self.line}\n{self.tool or 'answer'}: {self.text[:MAX_EXAMPLE]}"


@dataclass(frozen=True, slots=True, kw_only=True)
class GuardStats(Sums):
    """Counts of what the guard saw in one or many episodes."""

    checked: int = 0
    """Calls and answers that it was asked about."""
    blocked_turns: int = 0
    """Turns of the policy in which something was blocked."""
    events: tuple[GuardEvent, ...] = ()

    @classmethod
    def sum_stats(cls, parts: Iterable[GuardStats | None]) -> GuardStats | None:
        """Return the sum of the parts that are not None; None if all are, because there was no guard."""
        stats = [part for part in parts if part is not None]
        return sum(stats, cls()) if stats else None


@dataclass(frozen=True, slots=True, kw_only=True)
class GuardExample:
    """One call that a rule hit on."""

    episode: str
    text: str
    blocked: bool
    stage: str
    """Source of the decision: see `Stage`."""
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RuleRecord:
    """Counts of what one rule did in one domain in a step, or in several."""

    hits: int = 0
    blocked: int = 0
    stages: Mapping[str, int] = field(default_factory=dict)
    """Source of the decision -> how often."""
    examples: tuple[GuardExample, ...] = ()

    def __add__(self, other: RuleRecord) -> RuleRecord:
        return RuleRecord(
            hits=self.hits + other.hits,
            blocked=self.blocked + other.blocked,
            stages=dict(Counter(self.stages) + Counter(other.stages)),
            examples=_select_examples((*self.examples, *other.examples)),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class GuardRecord:
    """The guard's record of one domain in a step."""

    checked: int = 0
    blocked_turns: int = 0
    rules: Mapping[str, RuleRecord] = field(default_factory=dict)

    @property
    def unanswered(self) -> int:
        """Calls and answers about which the judge was asked and did not answer."""
        return sum(rule.stages.get("judge_failed", 0) for rule in self.rules.values())

    @classmethod
    def from_stats(cls, stats: GuardStats) -> Self:
        """Make the record from the counts of a domain."""
        rules: dict[str, RuleRecord] = {}
        for event in stats.events:
            rules[event.rule] = rules.get(event.rule, RuleRecord()) + _make_rule_record(event)
        return cls(checked=stats.checked, blocked_turns=stats.blocked_turns, rules=rules)


def _make_rule_record(event: GuardEvent) -> RuleRecord:
    verdict = event.verdict
    example = GuardExample(
        episode=event.episode,
        text=event.text[:MAX_EXAMPLE],
        blocked=not verdict.allowed,
        stage=verdict.stage,
        reason=verdict.reason[:MAX_EXAMPLE],
    )
    return RuleRecord(hits=1, blocked=int(not verdict.allowed), stages={verdict.stage: 1}, examples=(example,))


def _select_examples(examples: tuple[GuardExample, ...]) -> tuple[GuardExample, ...]:
    """Return at most two examples: the first that was blocked, and the first that was let pass."""
    first_by_verdict = {example.blocked: example for example in reversed(examples)}
    return tuple(first_by_verdict[blocked] for blocked in (True, False) if blocked in first_by_verdict)
