"""Responses of a single turn: their ids and seeds, and the rollouts of what an engine wrote. Nothing here calls an engine."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from itertools import groupby

from opd.errors import RunError
from opd.records.token_ids import find_unknown_id
from opd.records.types import Origin, Prompt, Rollout, Span
from opd.rollouts.worker import Generated


def make_sample_ids(prompts: Sequence[Prompt], step: int) -> list[str]:
    """Make an id for each prompt's response, which is its own even if a prompt comes several times."""
    counts: dict[str, int] = {}
    ids = []
    for prompt in prompts:
        counts[prompt.id] = counts.get(prompt.id, 0) + 1
        repeat = f"#{counts[prompt.id]}" if counts[prompt.id] > 1 else ""
        ids.append(make_group_id(step, prompt) + repeat)
    return ids


def make_group_id(step: int, prompt: Prompt) -> str:
    """Make the id of the first response to a prompt in a step, which also names the group of all responses to it."""
    return f"{step:06d}/{prompt.id}"


def derive_response_seed(seed: int, sample_id: str) -> int:
    """Return the seed of one response, of 32 bits, which depends on the run's seed and the sample's id alone."""
    return int.from_bytes(hashlib.sha256(f"{seed}/{sample_id}".encode()).digest()[:4], "big")


def refuse_unknown(sample_id: str, token_ids: Sequence[int], vocab_size: int) -> None:
    """Refuse a response with a token id that the tokenizer does not know, before it gets into the log of targets. Raises: RunError."""
    wrong = find_unknown_id(token_ids, vocab_size)
    if wrong is not None:
        raise RunError(
            f"sample {sample_id}: the rollout engine wrote token id {wrong}, the tokenizer knows 0 to {vocab_size - 1}"
        )


def make_rollout(
    prompt: Prompt, sample_id: str, step: int, out: Generated, masked: frozenset[int], policy_version: int
) -> Rollout:
    """Make the rollout of one response to a prompt; token ids in `masked` carry no loss."""
    return Rollout(
        sample_id=sample_id,
        group=make_group_id(step, prompt),
        episode=sample_id,
        step=step,
        domain=prompt.domain,
        prompt_ids=prompt.token_ids,
        response_ids=out.token_ids,
        behaviour_logprobs=out.logprobs,
        spans=_make_spans(out.token_ids, masked, policy_version),
        stop_reason=out.stop_reason,
    )


def _make_spans(token_ids: Sequence[int], masked: frozenset[int], policy_version: int) -> tuple[Span, ...]:
    """Return a span for each run of trained tokens and for each run of masked ones."""
    origins: list[Origin] = ["masked" if token in masked else "policy" for token in token_ids]
    # An empty response has one empty span.
    runs = [(origin, len(list(run))) for origin, run in groupby(origins)] or [("policy", 0)]
    return tuple(Span(length=length, origin=origin, policy_version=policy_version) for origin, length in runs)
