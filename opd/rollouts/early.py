"""Answers of an engine while others are still written, on the side of the worker."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeVar

R = TypeVar("R")
Part = list[tuple[int, Any]]
"""Places among what a worker was asked, and its answers."""


def sample_requests(
    engine: Any, requests: Sequence[tuple[Sequence[int], Any]], read: Callable[[Any], R]
) -> Iterator[Part]:
    """Have a `vllm.v1.engine.llm_engine.LLMEngine` write requests of token ids and parameters, all in one batch. Yield what
    `read` makes of each as soon as it is done, in the steps that `LLM.generate` takes."""
    for place, (token_ids, params) in enumerate(requests):
        # The request id is the place: the engine gives answers back in any order.
        engine.add_request(str(place), {"type": "token", "prompt_token_ids": list(token_ids)}, params)
    while engine.has_unfinished_requests():
        done = [output for output in engine.step() if output.finished]
        if done:
            yield [(int(output.request_id), read(output.outputs[0])) for output in done]


def in_groups(parts: Iterable[Part], groups: Sequence[int]) -> Iterator[Part]:
    """Hold answers back until all of their group are there, because every part costs a call. `groups` has the group of each
    request."""
    left, held = Counter(groups), defaultdict[int, Part](list)
    for part in parts:
        whole: Part = []
        for place, answer in part:
            group = groups[place]
            held[group].append((place, answer))
            left[group] -= 1
            whole += held.pop(group) if not left[group] else []
        if whole:
            yield whole
