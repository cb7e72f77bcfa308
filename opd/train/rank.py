"""One rank of the trainer: the distillation step. Runs in a Ray actor; every method is called on all ranks at once."""

from __future__ import annotations

import math
from collections import OrderedDict, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
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
from opd.models.heads import OWN_HEAD, FileStamp, Head, HeadSource
from opd.models.layouts import Packed
from opd.models.lora import tensor_name
from opd.payloads.none import Unscored
from opd.records.types import DomainStats, PositionStats, Rollout, TurnStats, WrittenFile
from opd.stream.part_files import read_part
from opd.stream.schema import TargetRow, read_stream
from opd.train.base_scoring import BaseScorer, BaseScoring
from opd.train.batch import DIVERGENCE, MicroBatch, build_micro_batch, build_unscored_batch, gather_samples
from opd.train.companions import Companion, CompanionSpec, StudentView
from opd.train.components import Component
from opd.train.export import WeightSender, gather_parameters
from opd.train.load import load_model_share
from opd.train.lora import LoraOptions, add_adapters, list_plain_weights, write_adapter
from opd.train.policy import GradientComparison
from opd.train.rank_channel import RankChannel
from opd.train.sequence_parallel import SequenceGroup, Shard
from opd.train.student import IndexerTermSpec, Student
from opd.train.totals import RankPolicy, Totals
from opd.train.turns import TurnWeights, compute_turn_factors
from opd.train.weight_average import WeightAverage, name_average
from opd.train.zero import ModelOptions, ZeroEngine
from opd.transfer.routes import MeetingPoint, PushPlan


@dataclass(frozen=True, slots=True, kw_only=True)
class RankWork:
    """One rank's part of one optimiser step."""

    step: int
    lr: float
    micro_batches: tuple[tuple[str, ...], ...]
    """Sample ids of each micro-batch. Every rank has the same number of micro-batches; some may be empty."""
    components: Mapping[str, Component]
    """Name -> component; the loss is their sum. `DIVERGENCE` is always among them if any token is trained."""
    compare: bool = False
    """True: compute the divergence's gradients and those of the other components in two passes, so that they can be compared."""
    baselines: Mapping[str, float] | None = None
    """Sample id -> number that the objective subtracts from the sample's advantages, as `opd.train.batch.leave_one_out_baselines`
    computes it over the whole step; None without a baseline."""
    stale: frozenset[str] = frozenset()
    """Samples with tokens that were written by older weights than the trainer holds."""
    first_turns: Mapping[str, int] = field(default_factory=dict)
    """Sample id -> number of turns that its dialogue had in earlier segments; a sample without such turns is left out."""
    watched: frozenset[str] = frozenset()
    """Samples whose loss is reported token by token."""
    companions: Mapping[str, Component] = field(default_factory=dict)
    """Name of a companion -> weights of the tokens in its loss."""
    base_rounds: Mapping[int, tuple[str, ...]] = field(default_factory=dict)
    """Index of a micro-batch -> teachers on the student's base that score a sample in it on at least one rank. All ranks run the
    forward passes of these, because they gather weights together."""
    teacher_prompts: Mapping[str, Mapping[str, tuple[int, ...]]] = field(default_factory=dict)
    """Teacher on the student's base with prompts of its own -> sample id -> [P] what it reads in the place of the sample's prompt."""

    def select_micro_batches(self, part: Sequence[Sequence[str]]) -> RankWork:
        """Return the work of the rank that trains these micro-batches; every field keeps the entries of their samples alone."""
        sample_ids = [i for ids in part for i in ids]
        return replace(
            self,
            micro_batches=tuple(map(tuple, part)),
            components={name: component.select_samples(sample_ids) for name, component in self.components.items()},
            companions={name: component.select_samples(sample_ids) for name, component in self.companions.items()},
            baselines=None
            if self.baselines is None
            else {i: self.baselines[i] for i in sample_ids if i in self.baselines},
            stale=self.stale.intersection(sample_ids),
            first_turns={i: self.first_turns[i] for i in sample_ids if i in self.first_turns},
            watched=self.watched.intersection(sample_ids),
            teacher_prompts={
                name: {i: prompts[i] for i in sample_ids if i in prompts}
                for name, prompts in self.teacher_prompts.items()
            },
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class RankResult:
    """Sums over one rank's rows."""

    loss: float
    """This rank's addend of the divergence's mean, nats; the sum over all ranks is the mean."""
    grad_norm: float
    """Norm of the gradient over all ranks, before clipping."""
    domains: dict[str, DomainStats]
    positions: dict[int, PositionStats]
    turns: dict[tuple[str, int], TurnStats] = field(default_factory=dict)
    token_losses: dict[str, tuple[float, ...]] = field(default_factory=dict)
    policy: RankPolicy | None = None
    indexer_loss: float | None = None
    """This rank's addend of the loss of the student's indexers, nats; None if they learn nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankOptions(ModelOptions):
    """Settings that a rank of the distilling trainer is started with."""

    objective: ObjectiveConfig
    """The objective that is minimised."""
    domain_objectives: Mapping[str, ObjectiveConfig] = field(default_factory=dict)
    """Domain -> objective, for domains that have one of their own."""
    temperature: float
    """Temperature at which the engine samples responses."""
    head_memory_bytes: int
    """Most bytes of teachers' output heads that this rank keeps for later micro-batches."""
    turn_weights: Mapping[str, TurnWeights] = field(default_factory=dict)
    """Domain -> weights of its turns; a domain whose turns all weigh the same is left out."""
    lora: LoraOptions | None = None
    """Settings of the adapters, which are trained in place of the student's own weights; None: the weights themselves."""
    base_scoring: BaseScoring | None = None
    """Settings with which the ranks score by teachers on the student's base; None if the teacher pool scores with all teachers.
    Needs `lora`, except for moving averages of the student."""
    companions: tuple[CompanionSpec, ...] = ()
    """Models that learn beside the student."""
    indexers: IndexerTermSpec | None = None
    """Settings with which the student's sparse indexers learn; None: they do not."""
    end_token_ids: tuple[int, ...] = ()
    """Tokens whose losses are reported by themselves, too: with `efforts` those that end thoughts or turns."""


class TrainerRank(ZeroEngine):
    """The distillation step on a ZeRO engine that holds the student."""

    _options: RankOptions

    def __init__(self, options: RankOptions, rank: int) -> None:
        super().__init__(options, rank, partial(_load_student, options))
        self._heads: OrderedDict[str, Head] = OrderedDict()
        self._hashed_heads: dict[str, FileStamp] = {}
        """For `HeadSource.read`: a head that finds no place in `trainer.head_memory` is read every step, but hashed once."""
        self._companions: dict[str, Companion] = {}
        self._sequence_group: SequenceGroup | None = None
        """The ranks that share rows with this one; None if every rank has rows of its own."""
        self._base_scorer: BaseScorer | None = None
        """Scorer with teachers on the student's base; None if there are none."""
        self._averages: dict[float, WeightAverage] = {}
        """Decay -> moving average of the student's weights, for teachers that are one."""
        self._gathered: Bucket | None = None
        """A bucket of new weights that the driver has not fetched yet."""

    def start(self, address: str, port: int) -> None:
        super().start(address, port)
        self._channel = RankChannel(self._rank, self._device)
        for spec in self._options.companions:
            self._companions[spec.name] = spec.start(self._options, self._rank, self._engine.module, self._device)
        options = self._options
        if options.base_scoring is not None:
            student, compiled = self._engine.module, options.compile
            self._averages = {
                decay: WeightAverage(decay, self._trained_parameters(), self._engine.optimizer)
                for decay in sorted({t.decay for t in options.base_scoring.teachers if t.decay is not None})
            }
            self._base_scorer = BaseScorer(
                options.base_scoring, student, self._device, compiled=compiled, averages=self._averages
            )
            self._base_scorer.check_probes()
        if options.sequence_parallel_size > 1:
            sizes = options.world_size, options.sequence_parallel_size
            self._sequence_group = SequenceGroup(self._rank, *sizes, options.timeout_s)

    def layout_error(self, layout: str) -> float:
        # A group divides lines of one sequence each; it needs no mask for these.
        return super().layout_error(layout) if self._sequence_group is None or layout == "padded" else math.inf

    def _compute_states(self, packed: Packed) -> Tensor:
        group = self._sequence_group
        if group is None:
            return super()._compute_states(packed)
        if packed.position_ids_B_T is not None:
            return group.gather_states(self._engine.module, packed)
        with group.attend_alone():  # a sequence alone, with which what the group computes is compared
            return super()._compute_states(packed)

    def logprobs(self, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        with self._sequence_group.attend_alone() if self._sequence_group else nullcontext():
            return super().logprobs(sequences)

    @property
    def _shard(self) -> Shard | None:
        return self._sequence_group.shard if self._sequence_group else None

    def begin_step(self, work: RankWork, heads: Mapping[str, HeadSource]) -> None:
        """Keep the work of a step. `heads`: content hash -> source of an output head, which is read when a micro-batch needs it."""
        options = self._options
        self._step = _StepInput(
            work, heads, options.vocab_size, tuple(options.domain_objectives), options.end_token_ids
        )

    def accumulate_micro_batch(self, index: int, left_out: frozenset[str], *parts: np.ndarray | Path) -> None:
        """Add the gradients of the step's micro-batch `index`. All ranks do this at the same time.

        `parts` came since the last call, and have rows of this rank among others: Arrow streams, or files of the target log that hold
        them. Each is an argument of its own, because Ray hands over top-level arguments as views into shared memory. `left_out` are
        samples that one of their teachers could not score: they are not trained, whatever the other teachers sent. If there are such
        samples, and components beside the divergence, the driver calls `rescale` afterwards. Raises: RunError if rows are missing.
        """
        step, work = self._step, self._step.work
        step.keep_rows(parts)
        ids = [i for i in work.micro_batches[index] if i not in left_out]
        for teacher in work.base_rounds.get(index, ()):
            self._score_on_base(teacher, ids)
        batch = step.micro_batch(ids, self._layout, self._shard)
        # Each head is fetched once, even if several blocks share it: between two fetches, other heads could evict it.
        needed = dict.fromkeys(key for block in batch.blocks for key in block.head_keys())
        made = {} if self._base_scorer is None else self._base_scorer.heads
        heads = {
            key: made[key] if key in made else self._fetch_head(step.heads[key]) for key in needed if key != OWN_HEAD
        }
        weights = {name: component.token_weights(batch, ids) for name, component in work.components.items()}
        if self._options.turn_weights:
            weights[DIVERGENCE] = weights[DIVERGENCE] * self._compute_turn_factors(batch, heads)
        # If `rescale` follows, its last pass is the one before the optimiser step, and not this one.
        last = index == len(work.micro_batches) - 1 and not (len(work.components) > 1 and left_out)
        pass_weights = weights
        if work.compare:
            loss, _ = self.model(*self._make_inputs(batch, ids, heads, {DIVERGENCE: weights[DIVERGENCE]}))
            self.add_gradients(loss, last=False)
            # The second pass has the divergence with weights of 0: it gives no gradient, but its statistics are computed.
            pass_weights = weights | {DIVERGENCE: torch.zeros_like(weights[DIVERGENCE])}
        view = StudentView(self._companions.values()) if self._companions else None
        for companion in self._companions.values():
            companion.begin_batch(batch)
        with self._note_added_gradients(pass_weights):
            loss, stats = self.model(*self._make_inputs(batch, ids, heads, pass_weights), view)
            self.add_gradients(loss, last=last)
        if view:
            self._train_companions(batch, ids, view)
        stale = frozenset(row for row, i in enumerate(ids) if i in work.stale)
        stats = to_device(stats, torch.device("cpu"))
        step.totals.add(batch, weights, stats, stale)
        step.totals.keep_token_losses(batch, stats, {row: i for row, i in enumerate(ids) if i in work.watched})

    def _train_companions(self, batch: MicroBatch, ids: Sequence[str], view: StudentView) -> None:
        """Have every companion add the gradients of this micro-batch, from what it saw of the student's passes."""
        moved = to_device(batch, self._device)
        for name, companion in self._companions.items():
            weight_N = self._step.work.companions[name].token_weights(batch, ids)
            companion.add_gradients(moved, view.hidden, weight_N.to(self._device))
        self._trim_memory()

    def rescale(self, index: int, more: Mapping[str, float]) -> None:
        """Add the gradients of components once more for the step's micro-batch `index`, each times its factor in `more`.

        A component that is not in `more` counts 0. All ranks do this at the same time, for every micro-batch.
        `DeepSpeedTrainer._rescale` gives the reason.
        """
        work, rollouts = self._step.work, self._step.other_rollouts[index]
        batch = build_unscored_batch(rollouts, self._layout, self._shard)
        ids = [rollout.sample_id for rollout in rollouts]
        weights = {name: term.token_weights(batch, ids) * more.get(name, 0.0) for name, term in work.components.items()}
        with self._note_added_gradients(weights):
            loss, _ = self.model(*self._make_inputs(batch, ids, {}, weights))
            self.add_gradients(loss, last=index == len(work.micro_batches) - 1)

    def _score_on_base(self, teacher: str, ids: Sequence[str]) -> None:
        """Score these samples with a teacher on the student's base, and keep its rows beside those of other teachers."""
        scorer, step = self._base_scorer, self._step
        assert scorer is not None
        prompts = step.work.teacher_prompts.get(teacher, {})
        rollouts = [
            r.as_read_by(prompts[r.sample_id]) if r.sample_id in prompts else r for r in step.select_rollouts(ids)
        ]
        rows = scorer.score_rollouts(teacher, rollouts, self._layout, step.dtype)
        step.add_rows(row.as_sampled() for row in rows)
        self._trim_memory()

    def _make_inputs(
        self, batch: MicroBatch, ids: Sequence[str], heads: Mapping[str, Head], weights: Mapping[str, Tensor]
    ) -> tuple[Any, ...]:
        """Return the arguments of `Student.forward` on this device, for a pass with the components in `weights`."""
        components, ranks = self._step.work.components, self._options.world_size
        # The weights already make the sum over all ranks a mean. DeepSpeed also averages over ranks: `ranks` cancels that.
        loss_weights = {name: weight_N * (components[name].factor * ranks) for name, weight_N in weights.items()}
        columns = {
            k: column_N for name in weights for k, column_N in components[name].token_columns(batch, ids).items()
        }
        return to_device((batch, heads, loss_weights, columns), self._device)

    @contextmanager
    def _note_added_gradients(self, weights: Mapping[str, Tensor]) -> Iterator[None]:
        """Within, a pass adds gradients; `GradientComparison` keeps what a pass with other components than the divergence added.

        Does nothing in a step whose gradients are not compared, and for a pass with the divergence alone.
        """
        compares = self._step.work.compare and len(weights) > 1
        if compares:
            self._step.comparison.begin(self.local_gradients())
        yield
        if compares:
            self._step.comparison.note_after_pass(self.local_gradients())

    def _compute_turn_factors(self, batch: MicroBatch, heads: Mapping[str, Head]) -> torch.Tensor:
        """Return [N] the factors by which the tokens' weights depend on their turns.

        If a domain's factors depend on divergences, all ranks first compute these in a forward pass without gradients.
        """
        weights, value_N = self._options.turn_weights, None
        if any(domain.divergence for domain in weights.values()):
            ones = {DIVERGENCE: torch.ones(len(batch.token_N), device=self._device)}
            with torch.no_grad():
                _, stats = self._engine.module(to_device(batch, self._device), heads, ones)
            value_N = stats.kl_N.cpu()
        return compute_turn_factors(batch, weights, value_N)

    def sum_weights(self) -> float:
        """Return the sum of the divergence's weights over this rank's tokens of the step, with the factors of turns."""
        return self._step.totals.weight

    def step_companions(self, shares: Mapping[str, float]) -> dict[str, dict[str, float]]:
        """Take an optimiser step of every companion; `finish_step` follows. Returns companion -> its numbers.

        `shares`: companion -> share of its tokens' weight that is on scored tokens, 0..1.
        """
        step = self._step.work.step
        return {name: companion.take_step(step, shares[name]) for name, companion in self._companions.items()}

    def finish_step(self, share: float) -> RankResult:
        """Take the optimiser step with the accumulated gradients divided by `share`, and drop the step's input.

        `share`: share of the divergence's weight that is on scored tokens, 0..1; with weights by turn, the sum of the weights of
        all ranks, `sum_weights`. Raises: RunError on a non-finite gradient.
        """
        work, totals = self._step.work, self._step.totals
        if totals.policy and work.compare:
            totals.policy.compared = self._step.comparison.compare_gradients(self.local_gradients(), share)
        del self._step
        grad_norm = self.take_step(work.step, work.lr, share)
        for average in self._averages.values():
            average.add_student()
        if self._base_scorer is not None:
            self._base_scorer.heads.clear()
        return RankResult(
            loss=totals.loss / share,
            grad_norm=grad_norm,
            domains=totals.domains,
            positions=totals.positions,
            turns=totals.turns,
            token_losses=totals.token_losses,
            policy=totals.policy,
            indexer_loss=self._take_indexer_loss(share),
        )

    def _take_indexer_loss(self, share: float) -> float | None:
        """Return this rank's addend of the indexers' loss; None if they learn nothing."""
        if self._options.indexers is None:
            return None
        # The weights in the loss are times the number of ranks, see `_make_inputs`.
        total: float = self._engine.module.indexers.take_sum()
        return total / (self._options.world_size * share)

    def _more_shards(self) -> dict[str, dict[str, Tensor]]:
        return {name_average(decay): average.shards for decay, average in self._averages.items()}

    def _take_more_shards(self, more: Mapping[str, Mapping[str, Tensor]]) -> None:
        for decay, average in self._averages.items():
            average.load_shards(more.get(name_average(decay)))
        if self._base_scorer is not None:
            self._base_scorer.heads.clear()  # the probes at the start were scored with the head of the first weights

    def begin_save(self, path: Path) -> None:
        super().begin_save(path)
        for companion in self._companions.values():
            companion.begin_save(path)

    def saved(self, wait_s: float) -> tuple[WrittenFile, ...] | None:
        parts = [super().saved(wait_s), *(companion.saved(wait_s) for companion in self._companions.values())]
        return None if None in parts else tuple(file for part in parts for file in part or ())

    def load(self, path: Path) -> None:
        super().load(path)
        for companion in self._companions.values():
            companion.load(path)

    def companion_weights(self, name: str) -> dict[str, Tensor]:
        """Return the weights of a companion, which are whole on every rank; empty on ranks after the first."""
        return self._companions[name].serving_weights() if self._rank == 0 else {}

    def export_companions(self, path: Path) -> None:
        """Make a directory for every companion in `path`, by its name, and let the companion write its model there."""
        for name, companion in self._companions.items():
            (path / name).mkdir(exist_ok=True)
            companion.export(path / name)

    def export_adapter(self, path: Path) -> None:
        """Gather the adapters and let rank 0 write them into `path` as PEFT does."""
        lm, tensors = self._engine.module.lm, {}
        parts = [
            (tensor_name(weight.module, letter), part)
            for weight in list_plain_weights(lm)
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
        """Return the bucket that rank 0 gathered, and drop it. This is the only method that is called on rank 0 alone."""
        bucket, self._gathered = self._gathered, None
        assert bucket is not None
        return bucket

    def memory_id(self) -> str:
        """Return the id of this rank's GPU: see `opd.transfer.handles.find_memory_id`."""
        return self._channel.memory_id

    def listen(self, address: str) -> int:
        """Listen at `address` for the processes of a channel, on rank 0 alone. Returns the port."""
        return self._channel.listen(address)

    def join_channel(self, meeting: MeetingPoint, processes: tuple[int, ...]) -> str:
        """Join the channel to the engines: see `RankChannel.join`."""
        return self._channel.join(meeting, processes)

    def plan_direct(self, nbytes: int) -> tuple[PushPlan, dict[int, tuple[bytes, ...]]]:
        """Plan a direct push of the weights that training changes: see `RankChannel.plan`."""
        return self._channel.plan(self._file_tensors(only_changed=True), nbytes)

    def send_directly(self, number: int, *, keeps: bool) -> str:
        """Send the weights of `plan_direct`: see `RankChannel.send`."""
        problem = self._channel.send(number, keeps=keeps)
        if self._options.lends_memory:
            torch.cuda.empty_cache()
        return problem

    def kept_bucket(self, index: int) -> Bucket:
        """Return a bucket that `send_directly` kept, on rank 0 alone."""
        return self._channel.kept_bucket(index)

    def _fetch_head(self, source: HeadSource) -> Head:
        """Return the head on this device, in the type in which it was sent; a head that is not in the cache is read.

        The cache keeps the heads that were used last, up to `head_memory_bytes` together. The newest one stays even if it
        alone is larger.
        """
        key, budget = source.key, self._options.head_memory_bytes
        if key not in self._heads:
            tables = source.read_tables()
            self._heads[key] = Head(
                source.read(self._hashed_heads).to(self._device),
                source.rule,
                None if tables is None else tables.to(self._device),
            )
            while len(self._heads) > 1 and sum(h.weight_V_D.nbytes for h in self._heads.values()) > budget:
                self._heads.popitem(last=False)
        self._heads.move_to_end(key)
        return self._heads[key]


def _load_student(options: RankOptions) -> Student:
    lm = load_model_share(options)
    if options.lora is not None:
        add_adapters(lm, options.lora)
    loss = options.objective
    loss_options: dict[str, Any] = {"vocab_size": options.vocab_size, "temperature": options.temperature}
    loss_options["own_objectives"] = {domain: own.build() for domain, own in options.domain_objectives.items()}
    if loss.reward is not None:
        loss_options["policy"] = PolicyGradient(low=loss.reward.ratio.low, high=loss.reward.ratio.high)
    return Student(lm, loss.build(), indexers=options.indexers, chunk=loss.chunk, compiled=loss.compile, **loss_options)


class _StepInput:
    """The step that is being trained on this rank: its work, the rows that came and are not trained yet, and the sums so far."""

    def __init__(
        self,
        work: RankWork,
        heads: Mapping[str, HeadSource],
        vocab_size: int,
        own_objectives: Sequence[str] = (),
        end_token_ids: Sequence[int] = (),
    ) -> None:
        """`own_objectives`: domains with an objective of their own. `end_token_ids`: see `Totals`."""
        self.work = work
        self._own_objectives = own_objectives
        self._vocab_size = vocab_size
        self.heads = heads
        self.totals = Totals(end_token_ids)
        self.comparison = GradientComparison()
        self.other_rollouts: list[tuple[Rollout, ...]] = []
        """For each micro-batch that was trained: its rollouts that take part in components beside the divergence. `rescale` needs
        them, because their rows are dropped by then."""
        self._sample_ids = {sample_id for ids in work.micro_batches for sample_id in ids}
        self._rows: dict[str, list[TargetRow]] = defaultdict(list)
        self.dtype = torch.float32
        """Type of the hidden states in the parts that came; all parts have the same."""

    def keep_rows(self, parts: Sequence[np.ndarray | Path]) -> None:
        """Decode this rank's rows of these parts, and keep each until its micro-batch is trained."""
        import pyarrow as pa

        for part in parts:
            raw = read_part(part)
            stream = read_stream(pa.py_buffer(raw), self._vocab_size, self._sample_ids.__contains__)
            self.dtype = getattr(torch, stream.dtype)
            self.add_rows(stream.rows)

    def add_rows(self, rows: Iterable[TargetRow]) -> None:
        """Keep each of these rows until its micro-batch is trained; a row with an answer takes the place of one without."""
        for row in rows:
            sample_id = row.rollout.sample_id
            assert sample_id in self._sample_ids, f"{sample_id} is of another rank"
            rows_of_sample = self._rows[sample_id]
            if rows_of_sample and isinstance(rows_of_sample[0].answer, Unscored):
                rows_of_sample.clear()
            rows_of_sample.append(row)

    def select_rollouts(self, ids: Sequence[str]) -> list[Rollout]:
        """Return the rollouts of these samples, whose rows stay. Raises: RunError if rows are missing."""
        self._refuse_missing(ids)
        return [self._rows[sample_id][0].rollout for sample_id in ids]

    def micro_batch(self, ids: Sequence[str], layout: str = "packed", shard: Shard | None = None) -> MicroBatch:
        """Return the tensors of these samples, and drop their rows; with `shard` only those of this rank's columns.

        Raises: RunError if rows are missing.
        """
        self._refuse_missing(ids)
        samples = gather_samples(row for sample_id in ids for row in self._rows.pop(sample_id))
        work = self.work
        others = {i for name, term in work.components.items() if name != DIVERGENCE for i in term.weights}
        self.other_rollouts.append(tuple(samples[i][0].rollout for i in ids if i in others))
        rest = (work.baselines, layout, work.first_turns, shard, self._own_objectives)
        return build_micro_batch([samples[i] for i in ids], self.dtype, *rest)

    def _refuse_missing(self, ids: Sequence[str]) -> None:
        missing = sorted(set(ids) - set(self._rows))
        if missing:
            raise RunError(f"step {self.work.step}: no teacher scored {missing[:3]}")
