"""The tokens that may be sampled for one session. A turn sets its limit aside before it runs, because others run beside it.

most   ── sampled ──┤── set aside by running turns ──┤── free ──
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable


class Budget:
    """Tokens that are left of a limit, shared by turns that run at once."""

    def __init__(self, most: int | None, sampled: Callable[[], int]) -> None:
        """`most` tokens, None for as many as there are; `sampled` says how many have been taken."""
        self._most, self._sampled = most, sampled
        self._reserved = 0
        self._freed = asyncio.Event()

    @property
    def spent(self) -> bool:
        """True if nothing is left, even if all running turns sample nothing more."""
        return self._most is not None and self._sampled() >= self._most

    async def reserve_tokens(self, requested: int) -> int:
        """Set tokens aside for a turn: as many as wanted, or all that are left once no other turn can give any back.

        0 if nothing is left. Call `give_back` once the tokens that were sampled are among those that have been taken.
        """
        share = requested
        while self._most is not None:
            remaining = max(0, self._most - self._sampled())
            share = min(requested, remaining)
            if self._reserved + share <= remaining:
                break
            await self._freed.wait()
        self._reserved += share
        return share

    def give_back(self, share: int) -> None:
        """Free the tokens that were set aside for a turn which has ended."""
        self._reserved -= share
        self._freed.set()
        # A new one for those who wait from now on; all who wait on the old one wake up and look again.
        self._freed = asyncio.Event()
