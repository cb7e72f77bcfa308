"""Seconds of each phase of a step, from shapes, lengths and rates. docs/plan.md writes the formulas out.

rollout   engines' steps: the larger of matrix products and bytes read, one event after the other
score     each teacher's rows on one worker, teachers one after the other
train     micro-batches of the busiest rank, then the optimiser
sync      new weights: gathered, sent, put in place, proven
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

from opd.config import PipelineConfig
from opd.config.sections import MAX_UNSHARDED
from opd.config.teachers import TransformersTeachers
from opd.models.packing import pack_into_rows
from opd.payloads import answer_class
from opd.settings.strict import DTYPE_BYTES
from opd.train.plan import RowSize, plan_micro_batches
from pipelines.plan.cost import Hardware, Seconds
from pipelines.plan.engine import EngineCost, EngineTimeline, simulate_writing
from pipelines.plan.lengths import StepLengths
from pipelines.plan.models import Models
from pipelines.plan.push import Push
from pipelines.plan.spec import ClusterSpec
from pipelines.routes import start_student_weights
from pipelines.sizing.cache import cache_copies
from pipelines.sizing.memory import in_memory, off_gpus
from teachers.scorers import SCORE_TOKENS


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingCost:
    """The trainer's part of a step."""

    micro_batches: tuple[Seconds, ...]
    last: Seconds
    """The optimiser."""
    gathers: int
    """Number of times that all weights are gathered."""

    @property
    def spent(self) -> Seconds:
        return sum(self.micro_batches, self.last)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCost:
    """Everything that the phases depend on but the lengths."""

    config: PipelineConfig
    spec: ClusterSpec
    models: Models
    hardware: Hardware
    slots: int
    """Sequences that one engine writes at a time."""

    def rollout_seconds(self, lengths: StepLengths) -> list[EngineTimeline]:
        """Every engine's part of a step; prompts are dealt out one by one."""
        workers, cost = self.hardware.rollout.workers, self._engine_cost(lengths.prompt)
        shares = [lengths.groups[worker::workers] for worker in range(workers)]
        return [simulate_writing(lengths.prompt, share, self.slots, cost) for share in shares if share]

    def _engine_cost(self, prompt: int) -> EngineCost:
        engine, shape, spec = self.hardware.rollout, self.models.student, self.spec
        dtype = self.config.rollout.dtype
        width = DTYPE_BYTES[dtype]
        factors, extra = spec.factors, spec.overheads
        copies = cache_copies(self.config, shape.attention, spec.machine.gpus)

        def prefill(tokens: int) -> Seconds:
            flops = shape.forward(tokens, prompt / 2)
            return Seconds(
                compute=engine.matmul_seconds(flops, dtype, factors.forward.share), link=self._reduce_seconds(tokens)
            )

        def step(batch: int, context: float) -> Seconds:
            flops = shape.forward(batch, context) + 2 * batch * shape.head
            products = engine.matmul_seconds(flops, dtype, factors.decode.share)
            looked_at = min(context, shape.attention.window or context)
            cache = batch * looked_at * shape.attention.kv_values * copies
            read = engine.copy_seconds((shape.numbers_read(batch) + cache) * width)
            return Seconds(
                compute=products if products >= read else 0.0,
                memory=read if read > products else 0.0,
                link=self._reduce_seconds(batch),
                overhead=engine.crowd * (extra.engine_step.of(shape.tensors) + batch * extra.token.s),
            )

        return EngineCost(
            prefill=prefill, step=step, request=Seconds(overhead=extra.request.s), phase=Seconds(overhead=extra.phase.s)
        )

    def _reduce_seconds(self, tokens: int) -> float:
        """Two sums a layer among the devices of one engine."""
        engine, shape = self.hardware.rollout, self.models.student
        if engine.devices <= 1:
            return 0.0
        nbytes = 2 * tokens * shape.hidden * DTYPE_BYTES[self.config.rollout.dtype]
        once = self.spec.overheads.message.s + engine.collective_seconds(nbytes, engine.devices)
        return 2 * shape.layers * once

    def score(self, lengths: StepLengths) -> list[Seconds]:
        """Every worker's part of a step: the teacher with the most rows goes to the worker with the fewest."""
        if self.config.teachers.elsewhere or not self.models.scorers:
            return []
        workers = self.hardware.teachers.workers
        rows = {name: self._rows_of(name, lengths) for name in self.models.scorers}
        loads = [(0, worker) for worker in range(workers)]
        seconds = [Seconds(overhead=self.spec.overheads.phase.s + self.spec.overheads.stream.s) for _ in range(workers)]
        for name in sorted(rows, key=lambda scorer: -sum(rows[scorer])):
            load, worker = heapq.heappop(loads)
            seconds[worker] += self._score_seconds(name, rows[name])
            heapq.heappush(loads, (load + sum(rows[name]), worker))
        return seconds

    def _rows_of(self, name: str, lengths: StepLengths) -> list[int]:
        """Sizes of the units of the domains that a teacher scores."""
        scoring = self.models.merge.scoring
        domains = {
            domain
            for domain, assigned in scoring.items()
            if name in [weighted_teacher.teacher.name for weighted_teacher in assigned]
        }
        return [unit.length for unit, _ in lengths.units if unit.domain in domains]

    def _score_seconds(self, name: str, sizes: Sequence[int]) -> Seconds:
        worker, shape, dtype = self.hardware.teachers, self.models.scorers[name], self.config.teachers.dtype
        extra = self.spec.overheads
        compute, read, passes = 0.0, 0, 0
        for batch in cut_into_runs(sorted(sizes), SCORE_TOKENS):
            tokens, wide = computed_tokens(batch)
            read += tokens
            flops = shape.forward(tokens, wide / 2)
            compute += worker.matmul_seconds(flops, dtype, self.spec.factors.forward.share)
            passes += 1
        rows = self.models.rows_by_scorer()[name]
        return Seconds(
            compute=compute,
            link=self._load_seconds(name) + passes * self._offload_seconds(name),
            overhead=extra.teacher.of(shape.tensors) + rows * extra.scored_row.s + read * extra.scored_token.s,
        )

    def _load_seconds(self, name: str) -> float:
        """Seconds until a teacher's weights are where it computes. Weights within `teachers.memory` stay there on CPUs, those
        within `teachers.gpu_memory` on GPUs."""
        worker, spec, teachers = self.hardware.teachers, self.spec, self.config.teachers
        sizes = teacher_bytes(self.config, self.models)
        share, every = spec.factors.link.share, sum(sizes.values())
        read = sizes[name] / (spec.links.disk * max(1.0, worker.machines / worker.workers) * share)
        budget = 0
        if isinstance(teachers, TransformersTeachers):
            budget = teachers.gpu_memory if spec.machine.gpus else teachers.memory
        if every <= budget:
            return 0.0
        if not spec.machine.gpus:
            return read
        copied = sizes[name] / (spec.links.load * worker.at_work * share)
        # Files that machines have read stay in half of their memory.
        return copied if every / worker.machines <= spec.machine.memory / 2 else max(copied, read)

    def _offload_seconds(self, name: str) -> float:
        """Seconds of a pass in which layers that are on no GPU come to the first one: from memory, and from the files."""
        teachers, links = self.config.teachers, self.spec.links
        if not self.spec.machine.gpus or not isinstance(teachers, TransformersTeachers) or not teachers.max_memory:
            return 0.0
        weights = self.models.merge.scorers[name].info.parameters * DTYPE_BYTES[teachers.dtype]
        off = off_gpus(teachers, weights)
        on_disk = off - in_memory(teachers, weights)
        return (off / links.load + on_disk / links.disk) / self.spec.factors.link.share

    def train_seconds(self, lengths: StepLengths) -> TrainingCost:
        """The busiest rank, which the others wait for in every micro-batch; then the optimiser."""
        trainer, config = self.hardware.trainer, self.config
        units = {unit.sample_id: (unit, responses) for unit, responses in lengths.units}
        rows = [unit for unit, _ in units.values()]
        plan = plan_micro_batches(rows, trainer.workers, config.trainer.micro_batch_tokens)
        ranks = [[[units[i] for i in part if i in units] for part in rank] for rank in plan]
        busiest = max(ranks, key=lambda rank: sum(unit.length for part in rank for unit, _ in part))
        return TrainingCost(
            micro_batches=tuple(self._micro_batch(part) for part in busiest),
            last=self._optimiser_seconds(),
            gathers=sum(3 if self._start_student_sizes(part) else 2 for part in busiest),
        )

    def _start_student_sizes(self, rows: Sequence[tuple[RowSize, tuple[int, ...]]]) -> list[int]:
        """Sizes of the units for which the ranks run the student without its adapters: it is one of their teachers."""
        domains = start_student_weights(self.config)
        return [unit.length for unit, _ in rows if unit.domain in domains]

    def _micro_batch(self, rows: Sequence[tuple[RowSize, tuple[int, ...]]]) -> Seconds:
        config, shape, trainer = self.config, self.models.student, self.hardware.trainer
        spec, dtype = self.spec, config.trainer.dtype
        tokens, wide = computed_tokens([unit.length for unit, _ in rows])
        trained = sum(sum(responses) for _, responses in rows)
        flops = self._passes * shape.forward(tokens, wide / 2) + 2 * trained * shape.head * self._head_passes()
        compute = trainer.matmul_seconds(flops, dtype, spec.factors.backward.share)
        start_sizes = self._start_student_sizes(rows)
        start_tokens, start_wide = computed_tokens(start_sizes)
        compute += trainer.matmul_seconds(
            shape.forward(start_tokens, start_wide / 2), dtype, spec.factors.forward.share
        )
        count = sum(len(responses) for _, responses in rows)
        extra = spec.overheads
        own = extra.micro_batch.of(shape.tensors) + count * extra.trained_row.s + tokens * extra.trained_token.s
        gathers = 3 if start_sizes else 2
        talk = self.gather_seconds(gathers) + self.reduce_gradients_seconds()
        hidden = min(spec.factors.hidden.share * talk, compute)
        # Logits of student and teachers in float32: written and read once each.
        logits = trainer.copy_seconds(trained * shape.vocab * 8 * (1 + self._teacher_heads()))
        return Seconds(
            compute=compute,
            memory=logits,
            link=talk - hidden,
            overhead=trainer.crowd * own + self._micro_batch_messages(gathers),
        )

    @property
    def _passes(self) -> float:
        """Forward passes whose products a training step's body costs: a backward pass costs two, one where the weights stay."""
        backward = 1.0 if self.models.merge.lora else 2.0
        return 1.0 + backward + (1.0 if self.config.trainer.gradient_checkpointing else 0.0)

    def phase_flops(self, lengths: StepLengths) -> dict[str, float]:
        """FLOPs of each phase that the models ask for, padding left out."""
        shape, context = self.models.student, lengths.tokens / len(lengths.responses) / 2
        responses = sum(lengths.responses)
        prompts = lengths.prompt * len(lengths.groups)
        scored = sum(
            scorer.forward(sum(self._rows_of(name, lengths)), context) for name, scorer in self.models.scorers.items()
        )
        laid_out = sum(unit.length for unit, _ in lengths.units)
        start_tokens = sum(self._start_student_sizes(lengths.units))
        heads = 2 * responses * shape.head * self._head_passes()
        return {
            "rollout": shape.forward(prompts + responses, context) + 2 * responses * shape.head,
            "score": scored,
            "train": self._passes * shape.forward(laid_out, context) + shape.forward(start_tokens, context) + heads,
            "sync": 0.0,
        }

    def _head_passes(self) -> float:
        """Products of a trained token's states with an output head: the student's there and back, each teacher's there."""
        back = 1 if self.models.merge.lora else 2
        return 1 + back + self._teacher_heads()

    def _teacher_heads(self) -> float:
        """Heads beside the student's for each trained token: none where teachers send log-probs, but that of a start student that
        the trainer asks."""
        sends = answer_class(self.config.teachers.payload).SENDS_HEADS
        start_samples = sum(self.models.samples[domain] for domain in start_student_weights(self.config))
        return ((self.models.opinions if sends else 0) + start_samples) / max(1, self.config.trainer.samples_per_step)

    def gather_seconds(self, times: int = 2) -> float:
        """Seconds to gather all weights so many times; a micro-batch does forward, and backward."""
        trainer = self.hardware.trainer
        nbytes = times * self.models.student.parameters * DTYPE_BYTES[self.config.trainer.dtype]
        return trainer.collective_seconds(nbytes, trainer.workers) if self._is_sharded() else 0.0

    def reduce_gradients_seconds(self) -> float:
        """Seconds to add up gradients, each rank its shard."""
        trainer = self.hardware.trainer
        nbytes = self.models.merge.trained * DTYPE_BYTES[self.config.trainer.grad_accum_dtype]
        return trainer.collective_seconds(nbytes, trainer.workers) if self._is_sharded() else 0.0

    def _is_sharded(self) -> bool:
        return self.hardware.trainer.workers > 1

    def _micro_batch_messages(self, gathers: int) -> float:
        """Collectives of a micro-batch: every tensor's gradient is added up, those that no rank holds whole are gathered."""
        if not self._is_sharded():
            return 0.0
        large = sum(p.layers for p in self.models.student.parts if p.parameters > MAX_UNSHARDED * p.layers)
        return (self.models.student.tensors + gathers * large) * self.spec.overheads.message.s

    def _optimiser_seconds(self) -> Seconds:
        """One pass over gradient, master, both moments and compute copy of a shard."""
        rank, trainer = self.hardware.trainer, self.config.trainer
        bytes_per_weight = 2 * 12 + 2 * DTYPE_BYTES[trainer.grad_accum_dtype] + DTYPE_BYTES[trainer.dtype]
        nbytes = self.models.merge.trained * bytes_per_weight / rank.workers
        return Seconds(
            memory=rank.copy_seconds(nbytes),
            overhead=self.spec.overheads.phase.s + rank.crowd * self.spec.overheads.step.s,
        )

    def push_seconds(self, lengths: StepLengths) -> Seconds:
        """A push to every engine, and its probe."""
        gathered = self.hardware.trainer.collective_seconds(self.push.nbytes, self.hardware.trainer.workers)
        # The probe's pass of the trainer gathers all weights once more.
        return self.push.push_seconds(lengths.prompt, gathered + self.gather_seconds(1))

    @property
    def push(self) -> Push:
        return Push(
            config=self.config,
            spec=self.spec,
            shape=self.models.student,
            hardware=self.hardware,
            pushed=self.models.merge.pushed,
        )


def teacher_bytes(config: PipelineConfig, models: Models) -> dict[str, int]:
    """Bytes that a teacher's turn brings in: an adapter where its base is another teacher's too."""
    width = DTYPE_BYTES[config.teachers.dtype]
    sizes = {}
    for name, expert in models.merge.scorers.items():
        sizes[name] = width * (expert.adapter.parameters if expert.adapter else expert.info.parameters)
    return sizes


def computed_tokens(sizes: Sequence[int]) -> tuple[int, int]:
    """(tokens of the rows that units are laid out in, width of a row): the padding counts."""
    if not sizes:
        return 0, 0
    packing = pack_into_rows(sizes)
    return packing.num_rows * packing.width, packing.width


def cut_into_runs(sizes: Sequence[int], most: int) -> list[list[int]]:
    """Consecutive runs of at most so many tokens; a longer unit is alone."""
    runs: list[list[int]] = []
    for size in sizes:
        if runs and sum(runs[-1]) + size <= most:
            runs[-1].append(size)
        else:
            runs.append([size])
    return runs
