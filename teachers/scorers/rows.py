"""What scorers share: rollouts in batches, and what a teacher said about one as a row of the target stream."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from opd.stream.schema import TargetRow
from opd.types import Rollout, Teacher


def batches(rollouts: Sequence[Rollout], max_tokens: int) -> Iterator[list[Rollout]]:
    """All rollouts, shortest first, `max_tokens` prompt and response tokens at a time; a longer one goes alone."""
    batch: list[Rollout] = []
    tokens = 0
    for rollout in sorted(rollouts, key=lambda r: (len(r.prompt_ids) + len(r.response_ids), r.sample_id)):
        length = len(rollout.prompt_ids) + len(rollout.response_ids)
        if batch and tokens + length > max_tokens:
            yield batch
            batch, tokens = [], 0
        batch.append(rollout)
        tokens += length
    if batch:
        yield batch


def target_row(rollout: Rollout, teacher: Teacher, head_key: str, answer: dict[str, Any]) -> TargetRow:
    """The rollout's own columns, and `answer`: the payload's."""
    return TargetRow(
        sample_id=rollout.sample_id,
        step=rollout.step,
        domain=rollout.domain,
        teacher=teacher.name,
        policy_version=rollout.policy_version,
        prompt_ids=rollout.prompt_ids,
        response_ids=rollout.response_ids,
        loss_mask=rollout.loss_mask,
        behaviour_logprobs=rollout.behaviour_logprobs,
        head=head_key,
        **answer,
    )


Position = Mapping[int, float]
"""Token -> log-prob at one place of a sequence: the token that stands there, and the likeliest ones if asked for."""


def logprob_answer(rollout: Rollout, positions: Sequence[Position], top_k: int) -> dict[str, Any] | None:
    """The payload columns from the log-probs at each response token, [R]; None if one is not finite.

    `top_k` 0 means the log-prob of the token itself. Otherwise the `top_k` likeliest of each position: engines add
    the token that stands there, however unlikely, and it must not take part.
    """
    if not all(math.isfinite(value) for position in positions for value in position.values()):
        return None
    if not top_k:
        pairs = zip(rollout.response_ids, positions, strict=True)
        return {"hidden_size": 0, "teacher_logprobs": [position[token] for token, position in pairs]}
    top = [sorted(position.items(), key=lambda entry: -entry[1])[:top_k] for position in positions]
    return {
        "hidden_size": 0,
        "topk_ids": [token for entries in top for token, _ in entries],
        "topk_logprobs": [value for entries in top for _, value in entries],
    }
