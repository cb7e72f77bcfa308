"""The engine's events against one that takes every step by itself."""

from __future__ import annotations

import random

import pytest

from pipelines.plan.cost import Seconds
from pipelines.plan.engine import EngineCost, simulate_writing

COST = EngineCost(
    prefill=lambda tokens: Seconds(compute=tokens),
    decode=lambda batch, seen: Seconds(memory=batch * (10 + seen), overhead=1),
    request=Seconds(overhead=0.5),
    phase=Seconds(link=3),
)


def slowly(prompt: int, lengths: list[int], slots: int) -> tuple[Seconds, int]:
    """The same engine, step by step; every response has a prompt of its own."""
    waiting, running, spent, steps = list(lengths), list[list[int]](), COST.phase, 0
    while waiting or running:
        new = 0
        while waiting and len(running) < slots:
            running.append([waiting.pop(0), 0])
            new += prompt
            spent += COST.request
        spent += COST.prefill(new)
        # A token sees those before it, and its step is counted in the middle.
        seen = sum(prompt + done + 0.5 for _, done in running) / len(running)
        spent += COST.decode(len(running), seen)
        running = [[left - 1, done + 1] for left, done in running if left > 1]
        steps += 1
    return spent, steps


@pytest.mark.parametrize("slots", [1, 3, 8, 100])
def test_events_take_as_long_as_steps(slots: int) -> None:
    chance = random.Random(slots)
    lengths = [chance.randint(1, 40) for _ in range(25)]
    spent, steps = slowly(7, lengths, slots)
    wrote = simulate_writing(7, [[length] for length in lengths], slots, COST)
    assert wrote.steps == steps
    assert wrote.spent.parts() == pytest.approx(spent.parts())
    assert wrote.sequences == pytest.approx(sum(lengths) / steps)


def test_a_prompt_is_read_once_for_its_responses() -> None:
    wrote = simulate_writing(7, [[3, 3], [3, 3]], 8, COST)
    assert wrote.spent.compute == 2 * 7 and wrote.steps == 3
