"""What the guard is asked and what it answers. The episode runner knows these names and no others."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from opd.guard.session import GuardSession
from opd.records.environments import ToolCall
from opd.records.guard import Verdict


class ToolGuard(Protocol):
    """What an episode asks before it carries out a call."""

    def session(self) -> GuardSession:
        """The state of a new episode."""
        ...

    def checks(self, tool: str) -> bool:
        """Whether calls of this tool are checked; with an empty name, whether answers are."""
        ...

    def check(self, call: ToolCall, session: GuardSession) -> Verdict:
        """Whether the call may run; if so, the session takes over what it changes."""
        ...

    def check_answer(self, text: str, session: GuardSession) -> Verdict:
        """Whether a turn without calls may be taken as an answer."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """What a judge is asked about one call. An answer counts for an equal question alone: `command` does not tell what is written into
    a file or given to a program, and one answer for all of that would let everything through."""

    tool: str
    text: str
    """The call as the policy wrote it."""
    command: str
    """The same, read by stage one: one line for each program call; empty if it does not parse."""
    suspicion: str
    """Why stage one asks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Opinion:
    """A judge's answer."""

    block: bool
    reason: str


class JudgeFailed(Exception):
    """There is no answer: no server, too late, or not one that can be read. `on_failure` decides."""


class Judge(Protocol):
    """Stage two."""

    def judge(self, question: Question) -> Opinion:
        """Whether the call cheats. Raises: JudgeFailed."""
        ...
