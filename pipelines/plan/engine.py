"""Simulate one rollout engine, event by event. Between two responses that end, every decode step is taken to cost the same."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from pipelines.plan.cost import Seconds

DecodeCost = Callable[[int, float], Seconds]
"""(sequences, tokens that each of them sees on average) -> cost of one decode step: a token for each sequence."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineCost:
    """Costs of the events of an engine."""

    prefill: Callable[[int], Seconds]
    """Tokens of prompts -> cost of reading them."""
    decode: DecodeCost
    request: Seconds
    """One response, in addition to its tokens."""
    phase: Seconds
    """The rollout phase of a training step, once for each engine."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineTimeline:
    """Simulated work of an engine in one training step."""

    spent: Seconds
    steps: int
    """Decode steps."""
    sequences: float
    """Mean number of sequences in a decode step."""


def simulate_writing(prompt: int, groups: Sequence[Sequence[int]], slots: int, cost: EngineCost) -> EngineTimeline:
    """Return the work of an engine that writes the responses to some prompts, at most `slots` of them at a time and in their order.

    `prompt`: tokens of each prompt, which is read once for all responses to it. `groups`: tokens of the responses to each prompt.
    """
    waiting = deque((length, index == 0) for group in groups for index, length in enumerate(group))
    running: list[tuple[int, int]] = []  # (decode step after which it ends, decode step at which it began)
    # `now` counts decode steps; `begun` is the sum of the steps at which the running responses began, `sampled` of all tokens.
    spent, now, begun, sampled = cost.phase, 0, 0, 0
    while waiting or running:
        new_prompt_tokens = 0
        while waiting and len(running) < slots:
            length, is_first = waiting.popleft()
            heapq.heappush(running, (now + length, now))
            begun += now
            new_prompt_tokens += prompt if is_first else 0
            spent += cost.request
        if new_prompt_tokens:
            spent += cost.prefill(new_prompt_tokens)
        ends = running[0][0]
        steps, batch = ends - now, len(running)
        # Halfway to `ends` a sequence sees its prompt and what it has written since it began, averaged over the batch.
        context = prompt + (now + ends) / 2 - begun / batch
        spent += cost.decode(batch, context).times(steps)
        sampled += steps * batch
        now = ends
        while running and running[0][0] == now:
            begun -= heapq.heappop(running)[1]
    return EngineTimeline(spent=spent, steps=now, sequences=sampled / max(1, now))
