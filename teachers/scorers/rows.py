"""Two helpers for scorers: split rollouts into batches, and build an answer from an engine's log-probs."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from opd.models.packing import make_packing_units
from opd.payloads.answer import Answer, Position
from opd.records.types import Rollout


def split_batches(rollouts: Sequence[Rollout], max_tokens: int, *, share: bool = False) -> Iterator[list[Rollout]]:
    """Yield all rollouts in batches of at most `max_tokens` prompt and response tokens, the shortest first.

    A rollout with more tokens is a batch of its own. With `share`, rollouts that begin with the same tokens stay
    together, and these tokens count once.
    """
    batch: list[Rollout] = []
    tokens = 0
    for unit in sorted(make_packing_units(rollouts, share=share), key=lambda u: (u.size, u.rollouts[0].sample_id)):
        if batch and tokens + unit.size > max_tokens:
            yield batch
            batch, tokens = [], 0
        batch.extend(unit.rollouts)
        tokens += unit.size
    if batch:
        yield batch


def build_logprob_answer(
    answers: type[Answer], rollout: Rollout, positions: Sequence[Position], top_k: int
) -> Answer | None:
    """Build the answer from `positions`, the log-probs at each of the N trained tokens; None if any is not finite."""
    if not all(math.isfinite(value) for position in positions for value in position.values()):
        return None
    return answers.of_positions(rollout.trained_ids, positions, top_k)
