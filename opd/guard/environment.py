"""An environment whose calls the guard sees first: what is blocked never reaches it.

The episode knows nothing of this: a blocked call is answered like any other, and `Outcome.info` has the verdicts for the trace.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

from opd.environments.records import Action, Outcome, Tool
from opd.guard.records import ToolGuard, Verdict
from opd.interfaces import Environment

if TYPE_CHECKING:
    from opd.prompts.line import Messages


class GuardedEnvironment:
    """Stands in for an environment during one episode."""

    def __init__(self, environment: Environment, guard: ToolGuard) -> None:
        self._environment = environment
        self._guard = guard
        self._session = guard.session()

    @property
    def tools(self) -> tuple[Tool, ...]:
        """The environment's own tools."""
        return self._environment.tools

    def reset(self, metadata: Mapping[str, Any], seed: int) -> str | Messages:
        """Begin the episode, and a new session of the guard."""
        self._session = self._guard.session()
        return self._environment.reset(metadata, seed)

    def step(self, action: Action) -> Outcome:
        """Carry out the calls that may run. The others are answered with the natural error of their program."""
        verdicts = [self._guard.check(call, self._session) for call in action.calls]
        allowed = tuple(call for call, verdict in zip(action.calls, verdicts, strict=True) if verdict.allowed)
        if action.calls and not allowed:
            outcome = Outcome(observation=tuple(verdict.observation for verdict in verdicts))
        else:
            outcome = self._environment.step(replace(action, calls=allowed))
            outcome = replace(outcome, observation=_woven(outcome.observation, verdicts))
        noted = [asdict(verdict) for verdict in verdicts if verdict.suspicion != "none"]
        return replace(outcome, info={**outcome.info, "guard": noted}) if noted else outcome

    def close(self) -> None:
        """Free what the episode holds."""
        self._environment.close()


def _woven(observed: str | tuple[str, ...], verdicts: Sequence[Verdict]) -> str | tuple[str, ...]:
    """One text for each call, those of blocked calls among the environment's own."""
    if all(verdict.allowed for verdict in verdicts):
        return observed
    if isinstance(observed, str):  # one text for all calls that ran
        return "\n".join([observed, *(v.observation for v in verdicts if not v.allowed and v.observation)])
    if len(observed) != sum(verdict.allowed for verdict in verdicts):
        return observed  # not what an environment may return: the episode says so
    own = iter(observed)
    return tuple(next(own) if verdict.allowed else verdict.observation for verdict in verdicts)
