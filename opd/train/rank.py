"""One rank of the trainer: the distillation step. Runs in a Ray actor; every method is called on all ranks at once."""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from opd.config.objectives import ObjectiveConfig
from opd.errors import RunError
from opd.losses.policy_gradient import PolicyGradient
from opd.machine.devices import to_device
from opd.models.buckets import Bucket
from opd.models.heads import OWN_HEAD, Head, HeadSource
from opd.models.lora import tensor_name
from opd.payloads.none import Unscored
from opd.records.types import DomainStats, PositionStats, Rollout, TurnStats
from opd.stream.schema import TargetRow, read_stream
from opd.train.batch import MicroBatch, Scored, gather_samples, micro_batch
from opd.train.export import WeightSender, gather_parameters
from opd.train.load import load_share
from opd.train.lora import LoraOptions, add_adapters, plain_weights, write_adapter
from opd.train.policy import GradientComparison, PolicyTotals, PolicyWork, RankPolicy
from opd.train.start import StartTeacher
from opd.train.student import Student
from opd.train.totals import Totals, token_weights
from opd.train.turns import TurnWeights, turn_factors
from opd.train.zero import ModelOptions, ZeroEngine


@dataclass(frozen=True, slots=True, kw_only=True)
class RankWork:
    """One rank's part of one optimiser step."""

    step: int
    lr: float
    micro_batches: tuple[tuple[str, ...], ...]
    """Sample ids of each micro-batch; every rank has the same number of them."""
    weights: Mapping[str, float]
    """Sample id -> weight of each of its trained tokens in the loss; over all ranks they make it a mean."""
    baselines: Mapping[str, float] | None = None
    """Sample id -> what the objective takes off its advantages, `opd.train.batch.leave_one_out` over the whole step; None
    without a baseline."""
    stale: frozenset[str] = frozenset()
    """Samples that older weights than the trainer's wrote."""
    first_turns: Mapping[str, int] = field(default_factory=dict)
    """Sample id -> turns of its dialogue in the segments before it; only of samples that have some."""
    watched: frozenset[str] = frozenset()
    """Samples whose loss is reported token by token."""
    policy: PolicyWork | None = None
    """The policy gradient; None without a reward."""
    start_rounds: frozenset[int] = frozenset()
    """Micro-batches for which all ranks ask the start student."""

    def select_micro_batches(self, part: Sequence[Sequence[str]]) -> RankWork:
        """Return one rank's part of the whole step's work: these micro-batches, and the entries of their samples."""
        sample_ids = [i for ids in part for i in ids]
        return replace(
            self,
            micro_batches=tuple(map(tuple, part)),
            weights={i: self.weights[i] for i in sample_ids},
            baselines=self.baselines and {i: self.baselines[i] for i in sample_ids if i in self.baselines},
            stale=self.stale.intersection(sample_ids),
            first_turns={i: self.first_turns[i] for i in sample_ids if i in self.first_turns},
            watched=self.watched.intersection(sample_ids),
            policy=self.policy and self.policy.select_samples(sample_ids),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class RankResult:
    """Sums over one rank's rows."""

    loss: float
    """This rank's share of the optimised mean."""
    grad_norm: float
    domains: dict[str, DomainStats]
    positions: dict[int, PositionStats]
    turns: dict[tuple[str, int], TurnStats] = field(default_factory=dict)
    token_losses: dict[str, tuple[float, ...]] = field(default_factory=dict)
    policy: RankPolicy | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RankOptions(ModelOptions):
    """Settings that a rank of the distilling trainer is started with."""

    objective: ObjectiveConfig
    """The objective that is minimised."""
    temperature: float
    """Temperature at which responses are sampled."""
    head_memory_bytes: int
    """Budget of the teachers' heads that stay on this rank."""
    turn_weights: Mapping[str, TurnWeights] = field(default_factory=dict)
    """Domain -> how much its turns weigh, for domains whose turns do not all weigh the same."""
    lora: LoraOptions | None = None
    """Settings of the adapters, which are trained in place of the student's own weights; None: the weights themselves."""
    start: StartTeacher | None = None
    """Settings for the student as the merge begins as a teacher; None if it is no teacher, or if a pool scores with it as with
    the others. Needs `lora`."""


class TrainerRank(ZeroEngine):
    """The distillation step on a ZeRO engine that holds the student."""

    _options: RankOptions

    def __init__(self, options: RankOptions, rank: int) -> None:
        super().__init__(options, rank, partial(_load_student, options))
        self._heads: OrderedDict[str, Head] = OrderedDict()
        self._gathered: Bucket | None = None
        """A bucket of new weights that the driver has not fetched yet."""

    def begin_step(self, work: RankWork, heads: Mapping[str, HeadSource]) -> None:
        """Take a step's work; heads, by content hash, are read when a micro-batch needs them."""
        self._step = _StepInput(work, heads, self._options.vocab_size)

    def accumulate_micro_batch(self, index: int, left_out: frozenset[str], *parts: np.ndarray) -> None:
        """Add the gradients of the step's micro-batch `index`; all ranks do at the same time.

        `parts` are streams of this rank's rows that came since the last call. Each is an argument of its own, because Ray hands
        over top-level arguments as views into shared memory. `left_out` are samples that one of their teachers could not score:
        they are not trained, whatever the other teachers sent. With a reward and such samples, `rescale_policy` follows.
        Raises: RunError if rows are missing.
        """
        step = self._step
        step.keep_rows(parts)
        ids = [i for i in step.work.micro_batches[index] if i not in left_out]
        if index in step.work.start_rounds:
            self._score_by_start(ids)
        batch = step.micro_batch(ids, self._layout)
        # Each key once: a head that several blocks share would be read a second time if others had evicted it meanwhile.
        needed = dict.fromkeys(key for block in batch.blocks for key in block.head_keys())
        heads = {key: self._fetch_head(step.heads[key]) for key in needed if key != OWN_HEAD}
        # DeepSpeed averages gradients over ranks; the weights make a sum over the global batch a mean.
        weight_N = token_weights(batch, [step.work.weights[i] for i in ids])
        if self._options.turn_weights:
            weight_N = weight_N * self._turn_factors(batch, heads)
        scaled_N = (weight_N * self._options.world_size).to(self._device)
        inputs = (to_device(batch, self._device), heads, scaled_N)
        work = step.work.policy
        # Samples that were left out make `rescale_policy` follow, whose last pass is then the one before the optimiser steps.
        last = index == len(step.work.micro_batches) - 1 and not (work and left_out)
        rewarded = work.token_advantages(batch, ids) if work else ()
        if work and work.compare:
            inputs = self._add_divergence_gradients(*inputs)
        loss, stats = self.model(*inputs, *self._scaled_advantages(rewarded))
        self.add_gradients(loss, last=last)
        if work and work.compare:
            step.comparison.note_after_pass(self.local_gradients())
        stale = frozenset(row for row, i in enumerate(ids) if i in step.work.stale)
        stats = to_device(stats, torch.device("cpu"))
        step.totals.add(batch, weight_N, stats, stale)
        step.totals.keep_token_losses(batch, stats, {row: i for row, i in enumerate(ids) if i in step.work.watched})
        if rewarded:
            step.policy_totals.add(batch, rewarded[1], stats)

    def rescale_policy(self, index: int, factor: float) -> None:
        """Add the policy gradient of the step's micro-batch `index` a second time, times `factor`.

        All ranks do this at the same time, for every micro-batch. See `DeepSpeedTrainer._rescale_policy` for the reason.
        """
        step = self._step
        work = step.work.policy
        assert work is not None
        rollouts = step.rewarded[index]
        batch = micro_batch([_make_unscored_sample(rollout) for rollout in rollouts], step.dtype, layout=self._layout)
        advantage_N, weight_N = work.token_advantages(batch, [rollout.sample_id for rollout in rollouts])
        nothing_N = torch.zeros(len(weight_N), device=self._device)
        if work.compare:
            step.comparison.begin(self.local_gradients())
        loss, _ = self.model(
            to_device(batch, self._device), {}, nothing_N, *self._scaled_advantages((advantage_N, weight_N * factor))
        )
        self.add_gradients(loss, last=index == len(step.work.micro_batches) - 1)
        if work.compare:
            step.comparison.note_after_pass(self.local_gradients())

    def _score_by_start(self, ids: Sequence[str]) -> None:
        """Score these samples with the student as the merge begins, and add its rows to those that other teachers sent."""
        start, step = self._options.start, self._step
        assert start is not None
        step.add_rows(
            start.score_rollouts(self._engine.module, step.select_rollouts(ids), self._layout, step.dtype, self._device)
        )
        self._trim_memory()

    def _scaled_advantages(self, rewarded: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Move the result of `PolicyWork.token_advantages` to this device, and scale its weights to those of the loss."""
        if not rewarded:
            return ()
        advantage_N, weight_N = rewarded
        assert self._step.work.policy is not None
        weight = self._step.work.policy.weight * self._options.world_size
        return advantage_N.to(self._device), (weight_N * weight).to(self._device)

    def _add_divergence_gradients(self, batch: MicroBatch, heads: Mapping[str, Head], weight_N: Tensor) -> tuple[Any, ...]:
        """Add the gradients of the divergence alone. Returns the inputs of a second pass, in which its weights are 0."""
        loss, _ = self.model(batch, heads, weight_N)
        self.add_gradients(loss, last=False)
        self._step.comparison.begin(self.local_gradients())
        return batch, heads, torch.zeros_like(weight_N)

    def _turn_factors(self, batch: MicroBatch, heads: Mapping[str, Head]) -> torch.Tensor:
        """Return [N] the factors by which turns change the tokens' weights.

        If they depend on divergences, a forward pass without gradients computes these first, on all ranks.
        """
        weights, value_N = self._options.turn_weights, None
        if any(domain.divergence for domain in weights.values()):
            ones_N = torch.ones(len(batch.token_N), device=self._device)
            with torch.no_grad():
                _, stats = self._engine.module(to_device(batch, self._device), heads, ones_N)
            value_N = stats.kl_N.cpu()
        return turn_factors(batch, weights, value_N)

    def sum_weights(self) -> float:
        """Return the sum of the weights of this rank's tokens of the step."""
        return self._step.totals.weight

    def finish_step(self, share: float) -> RankResult:
        """Step the optimiser with the accumulated gradients, divided by `share`, the sum of the token weights of all ranks.

        Raises: RunError on a non-finite gradient.
        """
        work, totals, policy = self._step.work, self._step.totals, self._policy_result(share)
        del self._step
        grad_norm = self.take_step(work.step, work.lr, share)
        return RankResult(
            loss=totals.loss / share,
            grad_norm=grad_norm,
            domains=totals.domains,
            positions=totals.positions,
            turns=totals.turns,
            token_losses=totals.token_losses,
            policy=policy,
        )

    def _policy_result(self, share: float) -> RankPolicy | None:
        """Return the sums of the policy gradient, before the optimiser steps; None without a policy gradient."""
        work = self._step.work.policy
        if work is None:
            return None
        totals = self._step.policy_totals
        compared = self._step.comparison.compare_gradients(self.local_gradients(), share) if work.compare else None
        return RankPolicy(loss=totals.loss, weight=totals.weight, domains=totals.domains, compared=compared)

    def export_adapter(self, path: Path) -> None:
        """Gather the adapters and let rank 0 write them into `path` as PEFT does."""
        lm, tensors = self._engine.module.lm, {}
        parts = [
            (tensor_name(weight.module, letter), part)
            for weight in plain_weights(lm)
            if weight.update is not None
            for letter, part in (("A", weight.update.a_K_I), ("B", weight.update.b_O_K))
        ]
        for name, part in parts:
            with gather_parameters([part]):
                if self._rank == 0:
                    tensors[name] = part.detach().to("cpu", self._dtype, copy=True)
        if self._rank == 0:
            write_adapter(lm, tensors, self._options.model_dir, path)

    def begin_stream(self, nbytes: int) -> tuple[bool, int]:
        """Begin to send the weights that training changes, in buckets of at most `nbytes`; `gather_bucket` gathers them.

        Returns True if these are all weights, and the number of buckets.
        """
        tensors = self._file_tensors(only_changed=True)
        self._sending = WeightSender(tensors, nbytes)
        return tensors.complete, self._sending.count

    def gather_bucket(self) -> None:
        """Gather the next bucket, which rank 0 keeps for `take_bucket`."""
        self._gathered = self._sending.gather_bucket(sends=self._rank == 0)

    def take_bucket(self) -> Bucket:
        """Return the bucket that rank 0 gathered, and drop it. The only method that is called on one rank alone."""
        bucket, self._gathered = self._gathered, None
        assert bucket is not None
        return bucket

    def _fetch_head(self, source: HeadSource) -> Head:
        """Return the head on this device, in the type that it was sent in, from a least-recently-used cache.

        The cache holds `head_memory_bytes`, or a single head that is larger.
        """
        key, budget = source.key, self._options.head_memory_bytes
        if key not in self._heads:
            self._heads[key] = Head(source.read().to(self._device), source.rule)
            while len(self._heads) > 1 and sum(h.weight_V_D.nbytes for h in self._heads.values()) > budget:
                self._heads.popitem(last=False)
        self._heads.move_to_end(key)
        return self._heads[key]


def _load_student(options: RankOptions) -> Student:
    dtype = getattr(torch, options.dtype)
    lm = load_share(options.model_dir, dtype, bucket=options.bucket, eager_attention=options.eager_attention)
    if options.lora is not None:
        add_adapters(lm, options.lora)
    loss = options.objective
    loss_options: dict[str, Any] = {"vocab_size": options.vocab_size, "temperature": options.temperature}
    if loss.reward is not None:
        loss_options["policy"] = PolicyGradient(low=loss.reward.ratio.low, high=loss.reward.ratio.high)
    return Student(lm, loss.build(), chunk=loss.chunk, compiled=loss.compile, **loss_options)


def _make_unscored_sample(rollout: Rollout) -> Scored:
    """Return the sample with one row without scores: its tokens take part in the policy gradient alone."""
    return (TargetRow(rollout=rollout, teacher="", answer=Unscored()),)


class _StepInput:
    """The step that is being trained: its work, and the rows that came and were not trained yet."""

    def __init__(
        self,
        work: RankWork,
        heads: Mapping[str, HeadSource],
        vocab_size: int,
    ) -> None:
        self.work = work
        self._vocab_size = vocab_size
        self.heads = heads
        self.totals = Totals()
        self.policy_totals = PolicyTotals()
        self.comparison = GradientComparison()
        self.rewarded: list[tuple[Rollout, ...]] = []
        """Per micro-batch that was trained, its rollouts that have an advantage."""
        self._sample_ids = {sample_id for ids in work.micro_batches for sample_id in ids}
        self._rows: dict[str, list[TargetRow]] = defaultdict(list)
        self.dtype = torch.float32
        """Type of the hidden states in the parts that came."""

    def keep_rows(self, parts: Sequence[np.ndarray]) -> None:
        """Decode these parts, and keep their rows until their micro-batch is trained."""
        import pyarrow as pa

        for part in parts:
            stream = read_stream(pa.py_buffer(part), self._vocab_size)
            self.dtype = getattr(torch, stream.dtype)
            self.add_rows(stream.rows)

    def add_rows(self, rows: Iterable[TargetRow]) -> None:
        """Keep these rows until their micro-batch is trained."""
        for row in rows:
            sample_id = row.rollout.sample_id
            assert sample_id in self._sample_ids, f"{sample_id} is of another rank"
            self._rows[sample_id].append(row)

    def select_rollouts(self, ids: Sequence[str]) -> list[Rollout]:
        """Return the rollouts of these samples. Raises: as `micro_batch`."""
        self._refuse_missing(ids)
        return [self._rows[sample_id][0].rollout for sample_id in ids]

    def micro_batch(self, ids: Sequence[str], layout: str = "packed") -> MicroBatch:
        """Return the tensors of these samples, and drop their rows. Raises: RunError if rows are missing."""
        self._refuse_missing(ids)
        samples = gather_samples(row for sample_id in ids for row in self._rows.pop(sample_id))
        work = self.work
        if work.policy is not None:
            self.rewarded.append(tuple(samples[i][0].rollout for i in ids if i in work.policy.advantages))
        return micro_batch([samples[i] for i in ids], self.dtype, work.baselines, layout, work.first_turns)

    def _refuse_missing(self, ids: Sequence[str]) -> None:
        missing = sorted(set(ids) - set(self._rows))
        if missing:
            raise RunError(f"step {self.work.step}: no teacher scored {missing[:3]}")
