"""Conversion of scored rows to the tensors of one micro-batch.

Shapes: B packed rows, T columns, N trained tokens of the micro-batch in row order. Prompts and tokens that are not trained
are read by the student's forward pass, and are in no tensor beside it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from opd.errors import RunError
from opd.losses.blocks import Block
from opd.models.layouts import LAYOUTS, Packed, find_positions_before_trained
from opd.payloads.none import Unscored
from opd.payloads.sampled_logprobs import mixed_logprobs
from opd.records.types import Rollout
from opd.stream.schema import TargetRow

DIVERGENCE, POLICY = "divergence", "policy"
"""Components of the student's loss."""
ADVANTAGE, RETURN, OLD_VALUE = "advantage", "return", "old_value"
"""Columns of the policy gradient and of a critic's loss."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatch:
    """The inputs of the student's forward pass and of the loss."""

    packed: Packed
    predict_N: Tensor
    """Flat index (row * T + column) of the position whose logits predict trained token n: the position before it."""
    token_N: Tensor
    """Sampled ids."""
    place_N: Tensor
    """Place of the token in its response, from 0."""
    turn_N: Tensor
    """Number of the turn of its dialogue in which it was written, from 0: a segment after a summary goes on."""
    own_N: Tensor
    """True if the student sampled the token, False if an expert wrote it in its place."""
    behaviour_N: Tensor
    """Log-prob under the rollout engine."""
    blocks: tuple[Block, ...]
    """The teachers' answers about the trained tokens, in order; the loss adds output heads."""
    row_lengths: tuple[int, ...]
    """Trained tokens of each row, in the order of `domains`; 0 for a row without one."""
    domains: tuple[str, ...]


Scored = tuple[TargetRow, ...]
"""One sample as its teachers scored it: a row for each, in the order of their names."""


def gather_samples(rows: Iterable[TargetRow]) -> dict[str, Scored]:
    """Return sample id -> its rows. Raises: RunError unless each of a sample's teachers is there exactly once."""
    by_sample: dict[str, list[TargetRow]] = defaultdict(list)
    for row in rows:
        by_sample[row.rollout.sample_id].append(row)
    for sample_id, sample_rows in by_sample.items():
        names = [row.teacher for row in sample_rows]
        # The weights travelled as float32, so they add up to 1 only about.
        if len(set(names)) != len(names) or abs(sum(row.weight for row in sample_rows) - 1) > 1e-4:
            parts = ", ".join(f"{row.teacher} {row.weight:.3g}" for row in sample_rows)
            raise RunError(f"sample {sample_id}: scored by {parts}; the weights of its teachers do not add up to 1")
    return {i: tuple(sorted(sample_rows, key=lambda row: row.teacher)) for i, sample_rows in by_sample.items()}


def leave_one_out(samples: Mapping[str, Scored]) -> dict[str, float]:
    """Return sample id -> mean of log q(y) - log mu(y) over the trained tokens of its domain in the step's other episodes.

    Other episodes, not other samples: an episode's later segments depend on its earlier ones. So a baseline does not depend on
    the sample that it is subtracted from, and leaves the gradient's mean as it is. 0 if there is no other episode. mu is the
    rollout engine's probability, which is there before the student's forward pass.
    """
    sums: dict[tuple[str, str], tuple[float, int]] = defaultdict(lambda: (0.0, 0))
    """Episode and domain -> sum and number."""
    totals: dict[str, tuple[float, int]] = defaultdict(lambda: (0.0, 0))
    rollouts = {sample_id: scored[0].rollout for sample_id, scored in samples.items()}
    for sample_id, rollout in rollouts.items():
        pairs = zip(mixed_logprobs(samples[sample_id]), _trained_logprobs(rollout), strict=True)
        ratios = [q - mu for q, mu in pairs]
        episode_sum, count = sums[rollout.episode, rollout.domain]
        sums[rollout.episode, rollout.domain] = (episode_sum + sum(ratios), count + len(ratios))
        total, count = totals[rollout.domain]
        totals[rollout.domain] = (total + sum(ratios), count + len(ratios))
    baselines = {}
    for sample_id, rollout in rollouts.items():
        (episode_sum, count), (total, number) = sums[rollout.episode, rollout.domain], totals[rollout.domain]
        baselines[sample_id] = (total - episode_sum) / (number - count) if number > count else 0.0
    return baselines


def micro_batch(
    samples: Sequence[Scored],
    dtype: torch.dtype,
    baselines: Mapping[str, float] | None = None,
    layout: str = "packed",
    first_turns: Mapping[str, int] | None = None,
) -> MicroBatch:
    """Build the tensors of these samples, which the caller ordered by teacher.

    `dtype` is the type of the stream's hidden states, `first_turns` the result of `opd.train.turns.count_earlier_turns`. Without samples
    the batch is one padding token and no trained token: a rank without rows still has to run forward with the others.
    """
    rollouts, firsts = [scored[0].rollout for scored in samples], first_turns or {}
    sequences = [[*r.prompt_ids, *r.response_ids] for r in rollouts] or [[0]]
    packed = LAYOUTS[layout](sequences)
    return MicroBatch(
        packed=packed,
        predict_N=find_positions_before_trained(packed, rollouts) if rollouts else torch.zeros(0, dtype=torch.long),
        token_N=torch.tensor([t for r in rollouts for t in r.trained_ids], dtype=torch.long),
        place_N=torch.tensor([position for r in rollouts for position in r.trained_positions], dtype=torch.long),
        turn_N=torch.tensor(
            [firsts.get(r.sample_id, 0) + turn for r in rollouts for turn in r.turns], dtype=torch.long
        ),
        own_N=torch.tensor([own for r in rollouts for own in r.sampled_mask], dtype=torch.bool),
        behaviour_N=torch.tensor([x for r in rollouts for x in _trained_logprobs(r)], dtype=torch.float32),
        blocks=type(samples[0][0].answer).blocks(samples, dtype, baselines) if samples else (),
        row_lengths=tuple(r.num_trained for r in rollouts),
        domains=tuple(r.domain for r in rollouts),
    )


def unscored_batch(rollouts: Sequence[Rollout], layout: str) -> MicroBatch:
    """Build the tensors of rollouts of which no teacher says anything."""
    rows = [TargetRow(rollout=rollout, teacher="", answer=Unscored()) for rollout in rollouts]
    return micro_batch([(row,) for row in rows], torch.float32, layout=layout)


def _trained_logprobs(rollout: Rollout) -> list[float]:
    """Return [N] the rollout engine's log-probs of the trained tokens."""
    return [rollout.behaviour_logprobs[position] for position in rollout.trained_positions]
