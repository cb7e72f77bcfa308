"""Conversion of scored rows to the tensors of one micro-batch.

Shapes: B lines of the packed layout, each of which holds one or more samples, T columns, N trained tokens of the micro-batch in the
order of the samples. The student's forward pass also reads prompts and tokens that are not trained; they are in no other tensor.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

import torch
from torch import Tensor

from opd.errors import RunError
from opd.losses.blocks import Block, DomainBlock
from opd.models.layouts import LAYOUTS, Packed, find_positions_before_trained
from opd.payloads.answer import Answer
from opd.payloads.none import Unscored
from opd.payloads.sampled_logprobs import mixed_logprobs
from opd.records.types import Rollout
from opd.stream.schema import TargetRow
from opd.train.sequence_parallel import Shard, select_shard

DIVERGENCE, POLICY = "divergence", "policy"
"""Names of the components of the student's loss."""
ADVANTAGE, RETURN, OLD_VALUE = "advantage", "return", "old_value"
"""Names of the values per token that the policy gradient and a critic's loss take; see `opd.train.components.Component.columns`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatch:
    """The inputs of the student's forward pass and of the loss."""

    packed: Packed
    predict_N: Tensor
    """Flat index (line * T + column) of the position whose logits predict trained token n: the position before it."""
    token_N: Tensor
    """Ids of the trained tokens."""
    place_N: Tensor
    """Place of the token in its response, from 0."""
    turn_N: Tensor
    """Number of the turn of its dialogue in which the token was written, from 0: a segment after a summary goes on counting."""
    sampled_N: Tensor
    """True if the student sampled the token, False if an expert wrote it in the student's place."""
    behaviour_N: Tensor
    """Log-prob of the token under the rollout engine that sampled it."""
    blocks: tuple[Block, ...]
    """The teachers' answers about the trained tokens, in their order. Products with the teachers' output heads are left to the loss."""
    lengths: tuple[int, ...]
    """Number of tokens of each sample."""
    trained_lengths: tuple[int, ...]
    """Number of trained tokens of each sample, 0 for a sample without one."""
    earlier_tokens: tuple[int, ...]
    """Number of trained tokens of each sample that stand before these: 0, unless ranks share rows (`opd.train.sequence_parallel`)."""
    domains: tuple[str, ...]
    """Domain of each sample."""


ScoredSample = tuple[TargetRow, ...]
"""One sample as its teachers scored it: a scored row from each teacher, in the order of their names."""


def gather_samples(rows: Iterable[TargetRow]) -> dict[str, ScoredSample]:
    """Return sample id -> its scored rows. Raises: RunError if a sample has two rows of one teacher, or if the weights of its rows do
    not add up to 1, because a teacher is missing."""
    by_sample: dict[str, list[TargetRow]] = defaultdict(list)
    for row in rows:
        by_sample[row.rollout.sample_id].append(row)
    for sample_id, sample_rows in by_sample.items():
        names = [row.teacher for row in sample_rows]
        # The weights travelled as float32, so they add up to 1 only approximately.
        if len(set(names)) != len(names) or abs(sum(row.weight for row in sample_rows) - 1) > 1e-4:
            parts = ", ".join(f"{row.teacher} {row.weight:.3g}" for row in sample_rows)
            raise RunError(f"sample {sample_id}: scored by {parts}; the weights of its teachers do not add up to 1")
    return {i: tuple(sorted(sample_rows, key=lambda row: row.teacher)) for i, sample_rows in by_sample.items()}


def leave_one_out_baselines(samples: Mapping[str, ScoredSample]) -> dict[str, float]:
    """Return sample id -> mean of log q(y) - log mu(y) over the trained tokens of its domain in the step's other episodes.

    q is the teachers' mixed probability, which only the payload `sampled_logprobs` has; mu is the rollout engine's, which is there
    before the student's forward pass. The mean is over other episodes, not other samples, because an episode's later segments depend
    on its earlier ones. So a baseline does not depend on the sample that it is subtracted from, and does not change the mean of the
    gradient. It is 0 if there is no other episode.
    """
    episode_sums: dict[tuple[str, str], tuple[float, int]] = defaultdict(lambda: (0.0, 0))
    """Episode and domain -> sum over its tokens, and their number."""
    domain_sums: dict[str, tuple[float, int]] = defaultdict(lambda: (0.0, 0))
    rollouts = {sample_id: scored[0].rollout for sample_id, scored in samples.items()}
    for sample_id, rollout in rollouts.items():
        pairs = zip(mixed_logprobs(samples[sample_id]), _trained_logprobs(rollout), strict=True)
        ratios = [q - mu for q, mu in pairs]
        episode_sum, episode_tokens = episode_sums[rollout.episode, rollout.domain]
        episode_sums[rollout.episode, rollout.domain] = (episode_sum + sum(ratios), episode_tokens + len(ratios))
        domain_sum, domain_tokens = domain_sums[rollout.domain]
        domain_sums[rollout.domain] = (domain_sum + sum(ratios), domain_tokens + len(ratios))
    baselines = {}
    for sample_id, rollout in rollouts.items():
        episode_sum, episode_tokens = episode_sums[rollout.episode, rollout.domain]
        domain_sum, domain_tokens = domain_sums[rollout.domain]
        other_tokens = domain_tokens - episode_tokens
        baselines[sample_id] = (domain_sum - episode_sum) / other_tokens if other_tokens else 0.0
    return baselines


def build_micro_batch(
    samples: Sequence[ScoredSample],
    dtype: torch.dtype,
    baselines: Mapping[str, float] | None = None,
    layout: str = "packed",
    first_turns: Mapping[str, int] | None = None,
    shard: Shard | None = None,
    own_objectives: Collection[str] = (),
) -> MicroBatch:
    """Build the tensors of these samples, which the caller ordered by teacher.

    `dtype` is the type of the stream's hidden states, `first_turns` the result of `opd.train.turns.count_earlier_turns`. Without samples
    the batch is one padding token and no trained token: a rank without rows still has to run forward with the others. With `shard`
    the batch has only this rank's columns, and the tokens that they predict; the layout is `padded` then. `own_objectives`: domains
    with an objective of their own.
    """
    firsts = first_turns or {}
    whole_rollouts = [scored[0].rollout for scored in samples]
    packed = LAYOUTS[layout]([[*r.prompt_ids, *r.response_ids] for r in whole_rollouts] or [[0]])
    if shard is not None:
        samples = select_shard(samples, shard)
    rollouts = [scored[0].rollout for scored in samples]
    predict_N = find_positions_before_trained(packed, rollouts) if rollouts else torch.zeros(0, dtype=torch.long)
    if shard is not None:
        predict_N = shard.find_own_columns(predict_N, packed.input_ids_B_T.shape[1])
        packed = shard.select_columns(packed)
    return MicroBatch(
        packed=packed,
        predict_N=predict_N,
        token_N=torch.tensor([t for r in rollouts for t in r.trained_ids], dtype=torch.long),
        place_N=torch.tensor([position for r in rollouts for position in r.trained_positions], dtype=torch.long),
        turn_N=torch.tensor(
            [firsts.get(r.sample_id, 0) + turn for r in rollouts for turn in r.turns], dtype=torch.long
        ),
        sampled_N=torch.tensor([sampled for r in rollouts for sampled in r.sampled_mask], dtype=torch.bool),
        behaviour_N=torch.tensor([x for r in rollouts for x in _trained_logprobs(r)], dtype=torch.float32),
        blocks=tuple(_build_blocks(samples, dtype, baselines or {}, own_objectives)),
        lengths=tuple(len(r.prompt_ids) + len(r.response_ids) for r in rollouts),
        trained_lengths=tuple(r.num_trained for r in rollouts),
        earlier_tokens=(0,) * len(rollouts)
        if shard is None
        else tuple(
            bisect_left(whole.trained_positions, own.trained_positions[0]) if own.num_trained else 0
            for whole, own in zip(whole_rollouts, rollouts, strict=True)
        ),
        domains=tuple(r.domain for r in rollouts),
    )


def _build_blocks(
    samples: Sequence[ScoredSample],
    dtype: torch.dtype,
    baselines: Mapping[str, float],
    own_objectives: Collection[str],
) -> Iterator[Block]:
    """Yield the blocks of consecutive samples with the same payload and objective. The payload's class makes them."""

    def find_kind(scored: ScoredSample) -> tuple[type[Answer], str]:
        domain = scored[0].rollout.domain
        return type(scored[0].answer), domain if domain in own_objectives else ""

    for (answers, domain), group in groupby(samples, find_kind):
        alike = list(group)
        has_baseline = any(scored[0].rollout.sample_id in baselines for scored in alike)
        for block in answers.blocks(alike, dtype, baselines if has_baseline else None):
            yield DomainBlock(domain, block) if domain else block


def build_unscored_batch(rollouts: Sequence[Rollout], layout: str, shard: Shard | None = None) -> MicroBatch:
    """Build the tensors of rollouts that no teacher has scored."""
    rows = [TargetRow(rollout=rollout, teacher="", answer=Unscored()) for rollout in rollouts]
    return build_micro_batch([(row,) for row in rows], torch.float32, layout=layout, shard=shard)


def _trained_logprobs(rollout: Rollout) -> list[float]:
    """Return [N] the rollout engine's log-probs of the trained tokens."""
    return [rollout.behaviour_logprobs[position] for position in rollout.trained_positions]
