"""A plan: what a merge needs and how long it takes on a cluster, as one record."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from opd.config import PipelineConfig
from opd.config.pipeline import rounds_of
from opd.settings.strict import DTYPE_BYTES
from pipelines.plan.cost import Hardware, Seconds, apply_placement
from pipelines.plan.lengths import StepLengths, draw_responses, stated_lengths
from pipelines.plan.models import Models, read_models
from pipelines.plan.phases import StepCost, teacher_bytes
from pipelines.plan.push import refuse_apart
from pipelines.plan.simulate import SimulatedStep, role_timeline, simulate_steps
from pipelines.plan.spec import ClusterSpec
from pipelines.sizing.cache import cache_bytes, cache_tokens
from pipelines.sizing.gpu_memory import MemoryRoom, count_gpus, fits_machine, memory_rooms, refuse_idle_gpus
from pipelines.sizing.memory import fullest_workers, refuse_no_room, target_bytes
from pipelines.sizing.parts import MemoryPart, worker_parts

SIMULATED = 20
"""Steps that are simulated at most; the others are taken to be like them."""
HOUR = 3600
ROW = 100
"""Bytes of a row beside its tokens: its id, its span, and its place in the dictionary. See "Rows on the way" in docs/architecture.md."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Transfer:
    """A transfer of one step."""

    what: str
    link: str
    nbytes: float
    """The sum over all workers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RoleRow:
    """Busy and idle time of one role's devices."""

    name: str
    workers: int
    devices: float
    """Devices of one worker."""
    busy: float
    """Share of the time in which it computes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PhasePlan:
    """One phase of a step, on its slowest worker; seconds, means over the simulated steps."""

    name: str
    seconds: float
    compute: float
    memory: float
    link: float
    overhead: float
    limit: str
    """The largest of the four."""
    flops: float
    """FLOPs of all workers that the model asks for, padding left out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MergePlan:
    """All that `opd plan` says."""

    pipeline: str
    cluster: str
    parameters: int
    active: int
    """Numbers that a token is multiplied with, the output head included."""
    experts: int
    steps: int
    samples: int
    prompt: int
    response: float
    """Mean tokens of a response."""
    sequences: float
    """Mean sequences in an engine's step."""
    memory: tuple[MemoryPart, ...]
    fullest: dict[str, int]
    """Role -> bytes of one worker and its process at its fullest, where there are no GPUs."""
    room: tuple[MemoryRoom, ...]
    traffic: tuple[Transfer, ...]
    phases: tuple[PhasePlan, ...]
    roles: tuple[RoleRow, ...]
    step_s: float
    hours: float
    """All steps; no start, no exams, no checkpoints."""
    devices: float
    device_hours: float
    limit: str
    fits: bool
    notes: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def make_plan(config: PipelineConfig, spec: ClusterSpec) -> MergePlan:
    """Plan a merge. Raises: OpdError for a model without a config or a formula, or a pipeline that a merge would refuse here."""
    spec, config = spec.at_its_speed(), apply_placement(config, spec)
    models = _read_models(config)
    hardware = Hardware.of(config, spec)
    refuse_apart(config, spec, hardware)
    cache = cache_bytes(config, models.merge, spec.machine.gpu_memory)
    slots, notes = _engine_slots(config, models, spec, cache)
    work = StepCost(config=config, spec=spec, models=models, hardware=hardware, slots=max(1, slots))
    total = sum(round_config.trainer.steps for round_config in rounds_of(config))
    steps = simulate_steps(work, spec.lengths, min(SIMULATED, total))
    lengths = draw_responses(config, models, spec.lengths, 0)
    phases = tuple(_phase_row(name, steps, flops) for name, flops in work.phase_flops(lengths).items())
    step_s = sum(step.wall for step in steps) / len(steps)
    room = tuple(memory_rooms(config, models.merge, spec.hardware, shared=spec.takes_turns))
    return MergePlan(
        pipeline=config.name,
        cluster=spec.name,
        parameters=models.student.parameters,
        active=models.student.active + models.student.head,
        experts=len(models.merge.experts),
        steps=total,
        samples=config.trainer.samples_per_step,
        prompt=stated_lengths(config, spec.lengths)[1],
        response=sum(step.response_tokens for step in steps) / len(steps) / config.trainer.samples_per_step,
        sequences=sum(step.sequences for step in steps) / len(steps),
        memory=tuple(
            worker_parts(config, models.merge, on_gpus=spec.machine.gpus > 0, cache=cache, rows=models.opinions)
        ),
        fullest={} if spec.machine.gpus else fullest_workers(config, models.merge),
        room=room,
        traffic=tuple(_step_traffic(work, lengths)),
        phases=phases,
        roles=tuple(_role_rows(steps, hardware)),
        step_s=step_s,
        hours=total * step_s / HOUR,
        devices=_spec_gpus(spec),
        device_hours=total * step_s / HOUR * _spec_gpus(spec),
        limit=_limiting_phase(phases),
        fits=slots > 0 and fits_machine(config, models.merge, spec.hardware, shared=spec.takes_turns),
        notes=(*models.notes, *notes, *_plan_notes(config, models, spec, hardware)),
    )


def fits_cluster(config: PipelineConfig, spec: ClusterSpec) -> bool:
    """Return `make_plan(config, spec).fits` without a simulated step. Raises: OpdError, as `make_plan` does."""
    config = apply_placement(config, spec)
    models, hardware = _read_models(config), Hardware.of(config, spec)
    refuse_apart(config, spec, hardware)
    slots, _ = _engine_slots(config, models, spec, cache_bytes(config, models.merge, spec.machine.gpu_memory))
    return slots > 0 and fits_machine(config, models.merge, spec.hardware, shared=spec.takes_turns)


def _read_models(config: PipelineConfig) -> Models:
    """The models of a pipeline whose GPUs and sizes a merge would take too. Raises: OpdError."""
    refuse_idle_gpus(config)
    models = read_models(config)
    refuse_no_room(config, models.merge.scorers)
    return models


def _spec_gpus(spec: ClusterSpec) -> float:
    return spec.devices if spec.machine.gpus else 0


def _engine_slots(config: PipelineConfig, models: Models, spec: ClusterSpec, cache: float) -> tuple[int, list[str]]:
    """Sequences that an engine writes at a time: `rollout.max_num_seqs`, or as many of mean length as its cache holds. With 0 the
    merge does not fit, and is planned as if it had room for one, to say what is missing."""
    lengths = draw_responses(config, models, spec.lengths, 0)
    sequence_tokens = lengths.tokens / len(lengths.responses)
    room, max_sequences = (
        int(cache_tokens(config, models.student.attention, spec.machine.gpus, cache) / sequence_tokens),
        config.rollout.max_num_seqs,
    )
    if room >= min(max_sequences, len(lengths.responses)):
        return max_sequences, []
    if not room:
        return 0, [
            f"the key-value cache has no room for a sequence of {sequence_tokens:.0f} tokens; planned as if it had room for one"
        ]
    return room, [
        f"the key-value cache holds {room} sequences of {sequence_tokens:.0f} tokens, rollout.max_num_seqs is {max_sequences}"
    ]


def _phase_row(name: str, steps: Sequence[SimulatedStep], flops: float) -> PhasePlan:
    mean = sum((step.phases[name] for step in steps), Seconds()).times(1 / len(steps))
    return PhasePlan(name=name, seconds=mean.total, **mean.parts(), limit=mean.limit, flops=flops)


def _step_traffic(work: StepCost, lengths: StepLengths) -> Iterator[Transfer]:
    """Everything of size that a step moves between processes."""
    config, models = work.config, work.models
    shape, merge = models.student, models.merge
    rows, responses = len(lengths.responses), sum(lengths.responses)
    rollouts = rows * ROW + 4 * rows * lengths.prompt + 8 * responses
    yield Transfer(what="rollouts", link="engines → driver → teachers", nbytes=rollouts)
    if models.scorers:
        opinions = models.opinions / rows
        targets = opinions * (rollouts + target_bytes(config, merge) * responses)
        yield Transfer(what="target rows", link="teachers → driver, log → ranks", nbytes=targets)
        turns = teacher_bytes(config, models)
        yield Transfer(what="teachers' weights", link="host or storage → scoring workers", nbytes=sum(turns.values()))
    ranks, copy = config.trainer.ranks, DTYPE_BYTES[config.trainer.dtype]
    if ranks > 1:
        trained = work.train_seconds(lengths)
        parts = len(trained.micro_batches)
        gathered = trained.gathers * shape.parameters * copy * (ranks - 1)
        summed = parts * merge.trained * DTYPE_BYTES[config.trainer.grad_accum_dtype] * (ranks - 1)
        yield Transfer(what="gathered weights", link="rank ↔ rank", nbytes=gathered)
        yield Transfer(what="summed gradients", link="rank ↔ rank", nbytes=summed)
    way = "rank 0 → object stores → engines" if work.push.over_network else "rank 0 → engines"
    yield Transfer(what="new weights", link=way, nbytes=work.push.sent)


def _role_rows(steps: Sequence[SimulatedStep], hardware: Hardware) -> list[RoleRow]:
    shares = {role: busy for role, busy, _ in role_timeline(steps)}
    by_role = {"rollout": hardware.rollout, "teachers": hardware.teachers, "trainer": hardware.trainer}
    return [
        RoleRow(name=name, workers=worker.workers, devices=worker.devices, busy=shares[name])
        for name, worker in by_role.items()
    ]


def _limiting_phase(phases: Sequence[PhasePlan]) -> str:
    longest = max(phases, key=lambda phase: phase.seconds)
    return f"{longest.name}: {longest.limit}"


def _plan_notes(config: PipelineConfig, models: Models, spec: ClusterSpec, hardware: Hardware) -> Iterator[str]:
    """Return notes on what the plan leaves out, or what a merge of today does not do."""
    acting = [name for name, domain in config.domains.items() if domain.has_episodes]
    if acting:
        yield f"planned as single responses although they are episodes of turns: {', '.join(acting)}"
    if isinstance(config.rounds, list):
        yield "every round is planned like the first"
    if config.objective.has_critic:
        yield "the critic's memory is planned, its time is not"
    if config.teachers.elsewhere:
        yield "teachers elsewhere are planned as if they scored at once"
    gpus = count_gpus(config, models.merge, shared=spec.takes_turns)
    if spec.machine.gpus and gpus > spec.devices:
        yield f"{gpus} devices are placed, the cluster has {spec.devices}"
    if spec.machine.gpus and hardware.rollout.devices > spec.machine.gpus:
        yield "a rollout engine on several machines is planned; `opd merge` starts each on one"
    if spec.machine.gpus and hardware.teachers.devices > spec.machine.gpus:
        yield "a teacher on several machines is planned; `opd merge` keeps each scoring worker on one"
