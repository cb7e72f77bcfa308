"""Questions to the guard and its answers. The episode runner knows these names and no others."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from opd.guard.session import GuardSession
from opd.records.environments import ToolCall
from opd.records.guard import Verdict


class ToolGuard(Protocol):
    """The check that an episode makes before it carries out a call."""

    def session(self) -> GuardSession:
        """Return the state of a new episode."""
        ...

    def checks(self, tool: str) -> bool:
        """Return True if calls of this tool are checked; with an empty name, whether answers are."""
        ...

    def check(self, call: ToolCall, session: GuardSession) -> Verdict:
        """Return the verdict on a call; if it may run, the session takes over what it changes."""
        ...

    def check_answer(self, text: str, session: GuardSession) -> Verdict:
        """Return the verdict on a turn without calls, which is an answer."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """The question to a judge about one call. An opinion counts for an equal question alone, and not for any with the same `command`:
    that does not tell what is written into a file or given to a program, so one opinion would let all of it through."""

    tool: str
    text: str
    """The call as the policy wrote it."""
    command: str
    """The same, read by stage one: one line for each program call; empty if it does not parse."""
    suspicion: str
    """The reason for which stage one asks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Opinion:
    """A judge's answer."""

    block: bool
    reason: str


class JudgeFailed(Exception):
    """The judge gave no opinion: no server, too late, or nothing that can be read. The guard's `on_failure` then decides."""


class Judge(Protocol):
    """Stage two of the guard."""

    def judge(self, question: Question) -> Opinion:
        """Return an opinion about the call. Raises: JudgeFailed."""
        ...
