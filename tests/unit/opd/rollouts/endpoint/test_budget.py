"""The tokens that parallel turns share: never more than there are, and no turn gets less than it might."""

from __future__ import annotations

import asyncio
import random
from contextlib import suppress

import pytest

from opd.rollouts.endpoint.budget import Budget


@pytest.mark.parametrize("seed", range(20))
def test_random_turns_take_no_more_than_there_is(seed: int) -> None:
    rng = random.Random(seed)
    most, sampled, cut = rng.randint(1, 60), 0, 0

    async def turn(budget: Budget, wanted: int, needed: int) -> None:
        nonlocal sampled, cut
        share = await budget.reserve_tokens(wanted)
        try:
            await asyncio.sleep(0)
            if rng.random() < 0.2:
                raise asyncio.CancelledError
            sampled += min(share, needed)
            cut += share < min(wanted, needed)
        finally:
            budget.give_back(share)

    async def work() -> Budget:
        budget = Budget(most, lambda: sampled)
        turns = [asyncio.ensure_future(turn(budget, rng.randint(1, 30), rng.randint(1, 30))) for _ in range(30)]
        for one in turns:
            if rng.random() < 0.1:
                one.cancel()
        for one in turns:
            with suppress(asyncio.CancelledError):
                await asyncio.wait_for(one, 20)
        return budget

    budget = asyncio.run(work())
    assert sampled <= most and budget.spent == (sampled == most)
    assert not cut or budget.spent, "no turn was cut while there was more"


def test_without_a_limit_nobody_waits() -> None:
    async def work() -> None:
        budget = Budget(None, lambda: 10**9)
        assert [await budget.reserve_tokens(5) for _ in range(3)] == [5, 5, 5] and not budget.spent

    asyncio.run(asyncio.wait_for(work(), 10))
