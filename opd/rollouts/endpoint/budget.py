"""The tokens that may be sampled for one session. Turns run side by side, so each sets tokens aside before it runs.

limit   ── sampled ──┤── set aside by running turns ──┤── free ──
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable


class Budget:
    """The tokens of a limit, shared by turns that run at once."""

    def __init__(self, limit: int | None, count_sampled: Callable[[], int]) -> None:
        """`limit` is in tokens, None for no limit; `count_sampled` returns how many tokens have been sampled so far."""
        self._limit, self._count_sampled = limit, count_sampled
        self._reserved = 0
        """Tokens that running turns have set aside."""
        self._freed = asyncio.Event()
        """Set when a turn gives its tokens back."""

    @property
    def spent(self) -> bool:
        """True if nothing is left, even if the running turns sample nothing at all."""
        return self._limit is not None and self._count_sampled() >= self._limit

    async def reserve_tokens(self, requested: int) -> int:
        """Set tokens aside for a turn, and return how many: as many as requested, or if the limit leaves fewer, all of those; 0 if
        nothing is left. Wait while other turns have set aside tokens of these, since they may give some back.

        Call `give_back` once the sampled tokens of the turn are among those that `count_sampled` counts.
        """
        share = requested
        while self._limit is not None:
            remaining = max(0, self._limit - self._count_sampled())
            share = min(requested, remaining)
            if self._reserved + share <= remaining:
                break
            await self._freed.wait()
        self._reserved += share
        return share

    def give_back(self, share: int) -> None:
        """Free the tokens that were set aside for a turn that has ended."""
        self._reserved -= share
        self._freed.set()
        # All who wait on the old event wake up and look again; those who wait from now on get a new one.
        self._freed = asyncio.Event()
