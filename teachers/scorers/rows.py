"""What scorers share: rollouts in batches, and the answer from an engine's log-probs."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from opd.models.packing import make_packing_units
from opd.payloads.answer import Answer, Position
from opd.records.types import Rollout


def split_batches(rollouts: Sequence[Rollout], max_tokens: int, *, share: bool = False) -> Iterator[list[Rollout]]:
    """Yield all rollouts, shortest first, `max_tokens` prompt and response tokens at a time; a longer one goes alone.

    With `share` those that begin alike stay together, and what they have in common counts once.
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
    """Build the answer from the log-probs at each trained token, [N]; None if one is not finite."""
    if not all(math.isfinite(value) for position in positions for value in position.values()):
        return None
    return answers.of_positions(rollout.trained_ids, positions, top_k)
