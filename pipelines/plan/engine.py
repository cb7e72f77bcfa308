"""One rollout engine, event by event: between two responses that end, every step costs the same."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from pipelines.plan.cost import Seconds

StepCost = Callable[[int, float], Seconds]
"""(sequences, tokens that one of them sees) -> one step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineCost:
    """Costs of an engine's events."""

    prefill: Callable[[int], Seconds]
    """Tokens of prompts -> reading them."""
    step: StepCost
    request: Seconds
    """One response, beside its tokens."""
    phase: Seconds
    """All responses of a step together."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineTimeline:
    """Simulated work of an engine."""

    spent: Seconds
    steps: int
    sequences: float
    """Mean sequences of a step."""


def simulate_writing(prompt: int, groups: Sequence[Sequence[int]], slots: int, cost: EngineCost) -> EngineTimeline:
    """Let an engine write the responses of some prompts, `slots` of them at a time, those that wait in order.

    A prompt is read once for all responses to it.
    """
    waiting = deque((length, index == 0) for group in groups for index, length in enumerate(group))
    running: list[tuple[int, int]] = []  # (step after which it ends, step at which it began)
    spent, now, begun, sampled = cost.phase, 0, 0, 0
    while waiting or running:
        new = 0
        while waiting and len(running) < slots:
            length, is_first = waiting.popleft()
            heapq.heappush(running, (now + length, now))
            begun += now
            new += prompt * is_first
            spent += cost.request
        if new:
            spent += cost.prefill(new)
        ends = running[0][0]
        steps, batch = ends - now, len(running)
        context = prompt + (now + ends) / 2 - begun / batch
        spent += cost.step(batch, context).times(steps)
        sampled += steps * batch
        now = ends
        while running and running[0][0] == now:
            begun -= heapq.heappop(running)[1]
    return EngineTimeline(spent=spent, steps=now, sequences=sampled / max(1, now))
