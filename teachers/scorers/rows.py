"""What scorers share: rollouts in batches, and what a teacher said about one as a row of the target stream."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from opd.payloads.answer import Answer, Position
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


def target_row(rollout: Rollout, teacher: Teacher, answer: Answer) -> TargetRow:
    """The rollout's own columns, and what the teacher says."""
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
        answer=answer,
    )


def logprob_answer(answers: type[Answer], rollout: Rollout, positions: Sequence[Position], top_k: int) -> Answer | None:
    """The answer from the log-probs at each response token, [R]; None if one is not finite."""
    if not all(math.isfinite(value) for position in positions for value in position.values()):
        return None
    return answers.of_positions(rollout.response_ids, positions, top_k)
