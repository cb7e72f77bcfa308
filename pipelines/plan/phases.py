"""Seconds of each phase of a step, from shapes, lengths and rates. docs/plan.md writes the formulas out.

rollout   steps of the engines: each takes as long as its matrix products or the bytes that it reads, whichever takes longer
score     batches of all teachers, dealt out among the workers; a worker scores with its teachers one after the other
train     micro-batches of the rank with the most tokens, then the optimiser
sync      new weights: gathered, sent, put in place, proven

A unit is what the trainer lays out together: a response with its prompt, or a tree of responses to one prompt (`StepLengths.units`).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import ceil, inf

from opd.config import PipelineConfig, has_short_first_round
from opd.config.sections import MAX_UNSHARDED
from opd.config.teachers import TrainerTeachers, TransformersTeachers
from opd.models.packing import pack_into_rows
from opd.settings.strict import DTYPE_BYTES
from opd.train.plan import RowSize, plan_micro_batches
from pipelines.plan.cost import Hardware, Seconds
from pipelines.plan.engine import EngineCost, EngineTimeline, simulate_writing
from pipelines.plan.lengths import StepLengths
from pipelines.plan.models import Models
from pipelines.plan.push import Push
from pipelines.plan.spec import ClusterSpec
from pipelines.routes import base_teacher_weights
from pipelines.sizing.cache import cache_copies
from pipelines.sizing.memory import in_memory, off_gpus, sends_heads, target_bytes
from pipelines.sizing.models import divide_models
from pipelines.sizing.shape import Shape
from teachers.scorers import SCORE_TOKENS
from teachers.shares import assign_batches
from teachers.weight_keys import base_key


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingCost:
    """Time of the trainer in one step."""

    micro_batches: tuple[Seconds, ...]
    last: Seconds
    """The optimiser, after all micro-batches."""
    gathers: int
    """Number of times that all weights are gathered."""

    @property
    def spent(self) -> Seconds:
        """Time of the whole phase."""
        return sum(self.micro_batches, self.last)


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseCosts:
    """Times of a step's phases, for any lengths: all else that they depend on is here."""

    config: PipelineConfig
    spec: ClusterSpec
    models: Models
    hardware: Hardware
    slots: int
    """Sequences that one engine writes at a time."""

    def rollout_seconds(self, lengths: StepLengths) -> list[EngineTimeline]:
        """Return the work of each engine in a step; prompts are dealt out one by one."""
        workers, cost = self.hardware.rollout.workers, self._engine_cost(lengths.prompt)
        shares = [lengths.groups[worker::workers] for worker in range(workers)]
        return [simulate_writing(lengths.prompt, share, self.slots, cost) for share in shares if share]

    def _engine_cost(self, prompt: int) -> EngineCost:
        """Return what the events of an engine cost; `prompt`: tokens of a prompt."""
        engine, shape, spec = self.hardware.rollout, self.models.student, self.spec
        dtype = self.config.rollout.dtype
        width = DTYPE_BYTES[dtype]
        factors, event = spec.factors, spec.overheads
        copies = cache_copies(self.config, shape.attention, spec.machine.gpus)

        def prefill(tokens: int) -> Seconds:
            flops = shape.forward(tokens, prompt / 2)  # a token looks at half of the prompt, on average
            return Seconds(
                compute=engine.matmul_seconds(flops, dtype, factors.forward.share), link=self._reduce_seconds(tokens)
            )

        def decode(batch: int, context: float) -> Seconds:
            flops = shape.forward(batch, context) + 2 * batch * shape.head
            products = engine.matmul_seconds(flops, dtype, factors.decode.share)
            visible = min(context, shape.attention.window or context)
            cache = batch * visible * shape.attention.kv_values * copies
            read = engine.copy_seconds((shape.numbers_read(batch) + cache) * width)
            # Products and reads overlap, so only the longer of the two takes time.
            return Seconds(
                compute=products if products >= read else 0.0,
                memory=read if read > products else 0.0,
                link=self._reduce_seconds(batch),
                overhead=engine.slowdown * (event.engine_step.seconds(shape.tensors) + batch * event.token.s),
            )

        request, phase = Seconds(overhead=event.request.s), Seconds(overhead=event.phase.s)
        return EngineCost(prefill=prefill, decode=decode, request=request, phase=phase)

    def _reduce_seconds(self, tokens: int) -> float:
        """Return the seconds in which the devices of one engine add up their parts of each layer's results, twice a layer."""
        engine, shape = self.hardware.rollout, self.models.student
        if engine.devices <= 1:
            return 0.0
        # An all-reduce passes its bytes twice: it adds them up in parts, then gathers the parts.
        nbytes = 2 * tokens * shape.hidden * DTYPE_BYTES[self.config.rollout.dtype]
        once = self.spec.overheads.message.s + engine.collective_seconds(nbytes, engine.devices)
        return 2 * shape.layers * once

    def score_seconds(self, lengths: StepLengths) -> list[Seconds]:
        """Return the time of each scoring worker in a step; the batches are dealt out as in a merge (`teachers.shares`)."""
        return [seconds for costs in self._divide_by_engine() for seconds in costs._engine_seconds(lengths)]

    def _divide_by_engine(self) -> list[PhaseCosts]:
        """Return the costs as they are for the teachers of each engine."""
        engines = divide_models(self.config, self.models.merge)
        if len(engines) == 1:
            return [replace(self, config=engines[0][0])]
        costs = []
        for config, merge in engines:
            teachers = replace(
                self.hardware.teachers,
                workers=max(1, config.teachers.scoring_workers),
                in_turn=isinstance(config.teachers, TransformersTeachers),
            )
            scorers = {name: shape for name, shape in self.models.scorers.items() if name in merge.scorers}
            models = replace(self.models, merge=merge, scorers=scorers)
            costs.append(
                replace(self, config=config, models=models, hardware=replace(self.hardware, teachers=teachers))
            )
        return costs

    def _engine_seconds(self, lengths: StepLengths) -> list[Seconds]:
        if self.config.teachers.elsewhere or not self._scorers:
            return []
        workers = self.hardware.teachers.workers
        bases = {name: base_key(self.models.merge.scorers[name].teacher) for name in self._scorers}
        batches = [
            (name, batch)
            for name in sorted(bases, key=lambda name: bases[name])
            for batch in cut_into_batches(sorted(size for size, _ in self._scored_units(name, lengths)), SCORE_TOKENS)
        ]
        owners = assign_batches([bases[name] for name, _ in batches], [sum(batch) for _, batch in batches], workers)
        shares: list[dict[str, list[list[int]]]] = [defaultdict(list) for _ in range(workers)]
        for (name, batch), owner in zip(batches, owners, strict=True):
            shares[owner][name].append(batch)
        phase = Seconds(overhead=self.spec.overheads.phase.s + self.spec.overheads.stream.s)
        return [
            sum((self._teacher_seconds(name, own, lengths) for name, own in share.items()), phase) for share in shares
        ]

    @property
    def _scorers(self) -> Mapping[str, Shape]:
        """The shapes of the teachers with which others than the trainer's ranks score."""
        return {} if isinstance(self.config.teachers, TrainerTeachers) else self.models.scorers

    def _scored_units(self, name: str, lengths: StepLengths) -> list[tuple[int, int]]:
        """Return (tokens, tokens of its responses) of each unit of the domains that a teacher scores."""
        scoring = self.models.merge.scoring.items()
        domains = {domain for domain, teachers in scoring if name in [weighted.teacher.name for weighted in teachers]}
        return [(unit.length, sum(responses)) for unit, responses in lengths.units if unit.domain in domains]

    def _teacher_seconds(self, name: str, batches: Sequence[Sequence[int]], lengths: StepLengths) -> Seconds:
        """Return the time in which one teacher comes to a worker and scores batches of units of these sizes, in tokens."""
        worker, shape, dtype = self.hardware.teachers, self.models.scorers[name], self.config.teachers.dtype
        event, log_rate = self.spec.overheads, self.spec.links.log or inf
        compute, computed = 0.0, 0
        for batch in batches:
            tokens, width = count_padded_tokens(batch)
            computed += tokens
            flops = shape.forward(tokens, width / 2)
            compute += worker.matmul_seconds(flops, dtype, self.spec.factors.forward.share)
        units = self._scored_units(name, lengths)
        share = sum(map(len, batches)) / len(units)
        rows = share * self.models.rows_by_scorer()[name]
        logged = share * sum(responses for _, responses in units) * target_bytes(self.config, self.models.merge)
        return Seconds(
            compute=compute,
            link=self._load_seconds(name) + len(batches) * self._offload_seconds(name) + logged / log_rate,
            overhead=event.teacher.seconds(shape.tensors) + rows * event.scored_row.s + computed * event.scored_token.s,
        )

    def _load_seconds(self, name: str) -> float:
        """Return the seconds until a teacher's weights are where it computes: 0 if all teachers fit into `teachers.memory` on CPUs, or
        into `teachers.gpu_memory` on GPUs, since they stay there."""
        worker, spec, teachers = self.hardware.teachers, self.spec, self.config.teachers
        sizes = teacher_bytes(self.config, self.models)
        share, total = spec.factors.link.share, sum(sizes.values())
        # A worker on several machines reads from all their disks. Each of several workers on one machine is planned with its whole rate.
        disks = max(1.0, worker.machines / worker.workers)
        disk_seconds = sizes[name] / (spec.links.disk * disks * share)
        budget = 0
        if isinstance(teachers, TransformersTeachers):
            budget = teachers.gpu_memory if spec.machine.gpus else teachers.memory
        if total <= budget:
            return 0.0
        if not spec.machine.gpus:
            return disk_seconds
        # A worker with a share of a GPU has a whole process to copy with.
        copy_seconds = sizes[name] / (spec.links.load * max(1.0, worker.at_work) * share)
        # Files that were read once stay in the page cache, which is taken to be half of a machine's memory: only the copy is left.
        is_cached = total / worker.machines <= spec.machine.memory / 2
        return copy_seconds if is_cached else max(copy_seconds, disk_seconds)

    def _offload_seconds(self, name: str) -> float:
        """Return the seconds of a pass in which layers that are on no GPU come to the first one: from memory, and those that
        memory does not hold from the files before."""
        teachers, links = self.config.teachers, self.spec.links
        if not self.spec.machine.gpus or not isinstance(teachers, TransformersTeachers) or not teachers.max_memory:
            return 0.0
        weights = self.models.merge.scorers[name].info.parameters * DTYPE_BYTES[teachers.dtype]
        off = off_gpus(teachers, weights)
        on_disk = off - in_memory(teachers, weights)
        return (off / links.load + on_disk / links.disk) / self.spec.factors.link.share

    def train_seconds(self, lengths: StepLengths) -> TrainingCost:
        """Return the time of the rank with the most tokens of the step, which the others wait for; then that of the optimiser."""
        trainer, config = self.hardware.trainer, self.config
        units = {unit.sample_id: (unit, responses) for unit, responses in lengths.units}
        sizes = [unit for unit, _ in units.values()]
        plan = plan_micro_batches(
            sizes, trainer.workers, config.trainer.micro_batch_tokens, short_first=has_short_first_round(config)
        )
        # The plan also names a tree's other samples, which are among no units: the tree counts once.
        ranks = [[[units[sample_id] for sample_id in part if sample_id in units] for part in rank] for rank in plan]
        busiest = max(ranks, key=lambda rank: sum(unit.length for part in rank for unit, _ in part))
        return TrainingCost(
            micro_batches=tuple(self._micro_batch_seconds(part) for part in busiest),
            last=self._optimiser_seconds(),
            gathers=sum(2 + len(self._base_passes(part)) for part in busiest),
        )

    def _base_passes(self, units: Sequence[tuple[RowSize, tuple[int, ...]]]) -> list[list[int]]:
        """Return the tokens of each unit in every pass that the ranks run without the student's adapters: one for each teacher on the
        student's base that scores any of the units."""
        by_teacher = base_teacher_weights(self.config, self.models.merge.scoring).values()
        passes = [[unit.length for unit, _ in units if unit.domain in domains] for domains in by_teacher]
        return [sizes for sizes in passes if sizes]

    def _micro_batch_seconds(self, units: Sequence[tuple[RowSize, tuple[int, ...]]]) -> Seconds:
        """Return the time of one micro-batch of a rank. `units`: each with the tokens of its responses, which are trained."""
        config, shape, trainer = self.config, self.models.student, self.hardware.trainer
        spec, dtype = self.spec, config.trainer.dtype
        tokens, width = count_padded_tokens([unit.length for unit, _ in units])
        trained = sum(sum(responses) for _, responses in units)
        head_flops = 2 * trained * shape.head * self._head_passes()
        flops = self._body_passes * shape.forward(tokens, width / 2) + head_flops
        compute = trainer.matmul_seconds(flops, dtype, spec.factors.backward.share)
        chunks = ceil(trained / config.objective.chunk)
        loss_calls = chunks * spec.overheads.loss_chunk.s
        loss_calls -= min(loss_calls, trainer.matmul_seconds(head_flops, dtype, spec.factors.backward.share))
        passes = [count_padded_tokens(sizes) for sizes in self._base_passes(units)]
        scored_flops = sum(shape.forward(scored, scored_width / 2) for scored, scored_width in passes)
        compute += trainer.matmul_seconds(scored_flops, dtype, spec.factors.forward.share)
        rows = sum(len(responses) for _, responses in units)
        event = spec.overheads
        extra = event.micro_batch.seconds(shape.tensors) + rows * event.trained_row.s + tokens * event.trained_token.s
        gathers = 2 + len(passes)  # forward, backward, and the passes without the student's adapters
        link = self.gather_seconds(gathers) + self.reduce_gradients_seconds()
        hidden_link = min(spec.factors.hidden.share * link, compute)
        # Logits of student and teachers in float32: written and read once each.
        logits = trainer.copy_seconds(trained * shape.vocab * 8 * (1 + self._teacher_heads()))
        return Seconds(
            compute=compute,
            memory=logits,
            link=link - hidden_link,
            overhead=trainer.slowdown * extra + loss_calls + self._message_seconds(gathers),
        )

    @property
    def _body_passes(self) -> float:
        """Cost of training the body, in forward passes: 1 for the forward pass, 2 for the backward pass (1 if LoRA keeps the weights as
        they are), 1 more for gradient checkpointing, which runs the forward pass twice, and the MLPs' share of it for tiles."""
        trainer, shape = self.config.trainer, self.models.student
        backward = 1.0 if self.models.merge.lora else 2.0
        tiled = 0.0 if trainer.mlp_tile_tokens is None else sum(p.active for p in shape.feed_forward) / shape.active
        return 1.0 + backward + (1.0 if trainer.gradient_checkpointing else 0.0) + tiled

    def phase_flops(self, lengths: StepLengths) -> dict[str, float]:
        """Return the FLOPs of all workers for each phase of a step, padding left out."""
        shape, context = self.models.student, lengths.tokens / len(lengths.responses) / 2
        responses = sum(lengths.responses)
        prompts = lengths.prompt * len(lengths.groups)
        scored = sum(
            scorer.forward(sum(size for size, _ in self._scored_units(name, lengths)), context)
            for costs in self._divide_by_engine()
            for name, scorer in costs._scorers.items()
        )
        laid_out = sum(unit.length for unit, _ in lengths.units)
        scored_tokens = sum(sum(sizes) for sizes in self._base_passes(lengths.units))
        heads = 2 * responses * shape.head * self._head_passes()
        train = self._body_passes * shape.forward(laid_out, context) + shape.forward(scored_tokens, context) + heads
        return {
            "rollout": shape.forward(prompts + responses, context) + 2 * responses * shape.head,
            "score": scored,
            "train": train,
            "sync": 0.0,
        }

    def _head_passes(self) -> float:
        """Return the number of products of a trained token's states with output heads: the student's forward and backward, each
        teacher's forward only."""
        back = 1 if self.models.merge.lora else 2
        return 1 + back + self._teacher_heads()

    def _teacher_heads(self) -> float:
        """Return the mean number of heads beside the student's for each trained token. Teachers that send log-probs need none, but with
        those on the student's base the ranks score themselves, with its head."""
        on_base = base_teacher_weights(self.config, self.models.merge.scoring)
        base_rows = sum(self.models.samples[domain] for domains in on_base.values() for domain in domains)
        head_rows = sum(costs.models.target_rows for costs in self._divide_by_engine() if sends_heads(costs.config))
        return (head_rows + base_rows) / max(1, self.config.trainer.samples_per_step)

    def gather_seconds(self, times: int = 2) -> float:
        """Return the seconds in which the ranks gather all weights so many times; a micro-batch does it forward and backward."""
        trainer = self.hardware.trainer
        nbytes = times * self.models.student.parameters * DTYPE_BYTES[self.config.trainer.dtype]
        return trainer.collective_seconds(nbytes, trainer.workers) if self._is_sharded() else 0.0

    def reduce_gradients_seconds(self) -> float:
        """Return the seconds in which the ranks add up gradients, each of them those of its shard."""
        trainer = self.hardware.trainer
        nbytes = self.models.merge.trained * DTYPE_BYTES[self.config.trainer.grad_accum_dtype]
        return trainer.collective_seconds(nbytes, trainer.workers) if self._is_sharded() else 0.0

    def _is_sharded(self) -> bool:
        return self.hardware.trainer.workers > 1

    def _message_seconds(self, gathers: int) -> float:
        """Return the overhead of a micro-batch's collectives: every tensor's gradient is added up, and the tensors that no rank holds
        whole are gathered."""
        if not self._is_sharded():
            return 0.0
        # A part is the same tensor in all its layers; the limit is that of one of them.
        large = sum(p.layers for p in self.models.student.parts if p.parameters > MAX_UNSHARDED * p.layers)
        return (self.models.student.tensors + gathers * large) * self.spec.overheads.message.s

    def _optimiser_seconds(self) -> Seconds:
        """Return the time of one pass over gradient, master, both moments and compute copy of a shard."""
        rank, trainer = self.hardware.trainer, self.config.trainer
        # Master and moments are 12 bytes in float32. These and the gradient are counted read and written, the copy once.
        bytes_per_weight = 2 * 12 + 2 * DTYPE_BYTES[trainer.grad_accum_dtype] + DTYPE_BYTES[trainer.dtype]
        nbytes = self.models.merge.trained * bytes_per_weight / rank.workers
        return Seconds(
            memory=rank.copy_seconds(nbytes),
            overhead=self.spec.overheads.phase.s + rank.slowdown * self.spec.overheads.step.s,
        )

    def push_seconds(self, lengths: StepLengths) -> Seconds:
        """Return the time of a push to all engines, and of its probe."""
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
    """Return the bytes that a scoring worker loads for each teacher: its weights, of an adapter without those of its base."""
    width = DTYPE_BYTES[config.teachers.dtype]
    return {
        name: width * (expert.adapter.parameters if expert.adapter else expert.info.parameters)
        for name, expert in models.merge.scorers.items()
    }


def count_padded_tokens(sizes: Sequence[int]) -> tuple[int, int]:
    """Return the tokens that are computed for units of these sizes, with the padding of their rows; and the width of a row."""
    if not sizes:
        return 0, 0
    packing = pack_into_rows(sizes)
    return packing.num_rows * packing.width, packing.width


def cut_into_batches(sizes: Sequence[int], most: int) -> list[list[int]]:
    """Cut units into batches of at most `most` tokens, in their order; a longer unit is alone."""
    batches: list[list[int]] = []
    for size in sizes:
        if batches and sum(batches[-1]) + size <= most:
            batches[-1].append(size)
        else:
            batches.append([size])
    return batches
