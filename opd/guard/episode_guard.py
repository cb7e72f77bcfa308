"""The guard during one episode: which calls of a turn may run, and what the policy reads in place of the others.

    turn ──▶ check_turn ──▶ allowed calls ──▶ environment, or agent's program ──▶ results ─┐
              │             blocked calls ──▶ natural errors ───────────────────────────┴▶ merge_observations
              └─▶ record_turn: events for the trace, once the turn is in it

Both kinds of episodes use it: one with an environment of ours checks a turn before it steps the environment, one of an agent's own
program before the reply goes out to that program.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from threading import Event, Lock
from typing import Any, Literal

from opd.guard.records import ToolGuard
from opd.guard.session import GuardSession
from opd.records.environments import ToolCall
from opd.records.guard import MAX_TEXT, GuardEvent, GuardStats, Verdict
from opd.records.types import Origin
from opd.tool_formats.call_fragments import find_begun_calls

MARKS: dict[Literal["keep", "mask", "negative"], Origin] = {"keep": "policy", "mask": "masked", "negative": "blocked"}
"""`guard.on_hit` -> origin of the tokens of a turn with a blocked call."""
NOT_MADE = "error: this call cannot be made: another one of this turn cannot be read"
"""The observation for a call that may run itself, but stands in a turn of which nothing happens (`CheckedTurn.hides`)."""
_EXECUTOR = ThreadPoolExecutor(max_workers=4096, thread_name_prefix="guard")
"""Threads in which turns are checked, one each. The event loop has only a few of its own, and a judge may keep a thread for long."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckedTurn:
    """The guard's verdicts on one turn."""

    calls: tuple[ToolCall, ...]
    """All calls of the turn."""
    verdicts: tuple[Verdict, ...] = ()
    """One for each of `calls`; if there are none, one for the answer if answers are checked; none without a guard."""
    begun: tuple[Verdict, ...] = ()
    """One for each further call that stands in the text of the turn, such as one that was not closed, and is not among `calls`."""
    stats: GuardStats = field(default_factory=GuardStats)
    """Counts and events for the trace."""

    @property
    def blocked(self) -> bool:
        """True if a call of the turn is blocked, or its answer."""
        return any(not verdict.allowed for verdict in (*self.verdicts, *self.begun))

    @property
    def stops(self) -> bool:
        """True if nothing of the turn happens: all of its calls are blocked, or its answer is, or a call in its text is (`hides`), since
        the text can only be handed on as a whole."""
        return self.hides or (self.blocked and not self.allowed)

    @property
    def hides(self) -> bool:
        """True if the text of the turn holds a call, beside `calls`, that is blocked."""
        return any(not verdict.allowed for verdict in self.begun)

    @property
    def allowed(self) -> tuple[ToolCall, ...]:
        """The calls that may run."""
        if not self.verdicts:
            return self.calls
        return tuple(call for call, verdict in zip(self.calls, self.verdicts, strict=False) if verdict.allowed)

    @property
    def dummies(self) -> tuple[str | None, ...]:
        """For each call of the turn the observation in place of its result; None for a call that runs."""
        results = (None if verdict.allowed else verdict.observation for verdict in self.verdicts)
        return tuple(results) if self.calls else ()

    @property
    def instead(self) -> str | tuple[str, ...]:
        """The observation in place of the results of a turn of which nothing happens: one text for each call, or one text."""
        if self.calls:
            return tuple(NOT_MADE if verdict.allowed else verdict.observation for verdict in self.verdicts)
        return next(verdict.observation for verdict in (*self.begun, *self.verdicts) if not verdict.allowed)

    def merge_observations(self, observation: str | tuple[str, ...]) -> str | tuple[str, ...]:
        """Return the observation of the calls that ran, with those for blocked calls put in at their places; behind it if it is one text."""
        if not self.blocked:
            return observation
        if isinstance(observation, str):  # one text for all calls that ran
            return "\n".join([observation, *filter(None, self.dummies)])
        results = iter(observation)  # once the episode is done, an environment may return fewer
        return tuple(next(results, "") if dummy is None else dummy for dummy in self.dummies)


class GuardWatch:
    """The guard during one episode: its session, and the counts and events for the trace."""

    def __init__(self, guard: ToolGuard, episode: str, on_hit: Literal["keep", "mask", "negative"] = "keep") -> None:
        """`episode` is the sample id of the episode."""
        self.mark = MARKS[on_hit]
        """Origin of the tokens of a turn with a blocked call."""
        self.stats = GuardStats()
        """Counts and events of the turns that are in the trace."""
        self._guard = guard
        self._session = guard.session()
        self._episode = episode
        self._lock = Lock()

    async def check_turn(self, turn: int, text: str, calls: Sequence[ToolCall]) -> CheckedTurn:
        """Return the verdicts on a turn, without `record_turn`. `turn` is its number, `calls` the calls that were read from it, and `text`
        all that the program or environment gets of it. It is checked in a thread, for a judge takes up to its deadline for each call. If
        this coroutine is cancelled, the session stays as it was."""
        cancelled = Event()
        try:
            return await asyncio.get_running_loop().run_in_executor(
                _EXECUTOR, self._check_turn, turn, text, tuple(calls), cancelled
            )
        except asyncio.CancelledError:
            cancelled.set()
            raise

    def record_turn(self, checked_turn: CheckedTurn) -> None:
        """Add the counts and events of a turn that is in the trace."""
        self.stats += checked_turn.stats

    def _check_turn(self, turn: int, text: str, calls: tuple[ToolCall, ...], cancelled: Event) -> CheckedTurn:
        """Check the calls of a turn. The session takes over what they change, unless `cancelled` is set by then."""
        with self._lock:  # a program may make several requests at once, and they share a session
            next_session = self._session.copy()
            if calls:
                verdicts = tuple(self._check(call, next_session) for call in calls)
            else:
                verdicts = (self._guard.check_answer(text, next_session),) if self._guard.checks("") else ()
            begun_calls = tuple(call for call in find_begun_calls(text) if call not in calls)
            begun = tuple(self._check(call, next_session) for call in begun_calls)
            if not cancelled.is_set():
                self._session.take_over(next_session)
        checked = sum(map(self._is_checked, calls)) if calls else len(verdicts)
        call_texts = [(call.name, _arguments_as_text(call.arguments)) for call in calls] or [("", text)] * len(verdicts)
        call_texts += [(call.name, _arguments_as_text(call.arguments)) for call in begun_calls]
        events = tuple(
            GuardEvent(episode=self._episode, turn=turn, tool=name, text=call_text[:MAX_TEXT], verdict=verdict)
            for (name, call_text), verdict in zip(call_texts, (*verdicts, *begun), strict=True)
            if verdict.suspicion != "none"
        )
        checked_turn = CheckedTurn(calls=calls, verdicts=verdicts, begun=begun)
        stats = GuardStats(
            checked=checked + sum(map(self._is_checked, begun_calls)),
            blocked_turns=int(checked_turn.blocked),
            events=events,
        )
        return replace(checked_turn, stats=stats)

    def _is_checked(self, call: ToolCall) -> bool:
        return not call.name or self._guard.checks(call.name)

    def _check(self, call: ToolCall, session: GuardSession) -> Verdict:
        """Return the guard's verdict on a call; a call of a tool that is not checked is allowed."""
        if not self._is_checked(call):
            return Verdict(allowed=True, stage="rules", suspicion="none")
        return self._guard.check(call, session)


def _arguments_as_text(arguments: Mapping[str, Any]) -> str:
    """Return the arguments of a call as a text for people: a single text as it is, anything else as JSON."""
    values = list(arguments.values())
    if len(values) == 1 and isinstance(values[0], str):
        return values[0]
    return json.dumps(dict(arguments), ensure_ascii=False, default=dict)
