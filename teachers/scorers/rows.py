"""What scorers share: rollouts in batches, and the answer from an engine's log-probs."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from opd.payloads.answer import Answer, Position
from opd.types import Rollout


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


def logprob_answer(answers: type[Answer], rollout: Rollout, positions: Sequence[Position], top_k: int) -> Answer | None:
    """The answer from the log-probs at each trained token, [N]; None if one is not finite."""
    if not all(math.isfinite(value) for position in positions for value in position.values()):
        return None
    return answers.of_positions(rollout.trained_ids, positions, top_k)
