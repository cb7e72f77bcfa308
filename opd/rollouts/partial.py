"""Partial rollouts: a long response is cut after so many tokens, and the next weights carry it on (Kimi k1.5, arXiv 2501.12599)."""

from __future__ import annotations

from dataclasses import dataclass

from opd.records.types import Rollout


@dataclass(frozen=True, slots=True, kw_only=True)
class Cuts:
    """Rule for where responses are cut, by their tokens alone, so that a resume cuts them in the same places."""

    at: int
    """A response is cut each time when it has so many tokens more, unless it ends there."""
    times: int
    """Cuts of one response at most; then it is written to its end. 0: none is cut."""
    begun: tuple[Rollout, ...] = ()
    """Responses that were cut in the step before, to be carried on."""

    def tokens_allowed(self, written: int, left: int) -> int:
        """Return how many tokens a response may get now; it has `written` already, and may have `left` more in all."""
        return left if written >= self.at * self.times else min(self.at, left)
