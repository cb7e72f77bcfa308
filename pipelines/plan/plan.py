"""A plan: what a merge needs and how long it takes on a cluster, as one record."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from opd.config import PipelineConfig
from opd.config.pipeline import split_rounds
from opd.config.teachers import TrainerTeachers
from opd.errors import ConfigError
from opd.settings.strict import DTYPE_BYTES
from pipelines.inputs.transformers_engine import TRANSFORMERS_ENGINE
from pipelines.plan.cost import Hardware, Seconds, apply_placement, placement_keys
from pipelines.plan.lengths import StepLengths, draw_responses, stated_lengths
from pipelines.plan.models import Models, read_models
from pipelines.plan.nodes import refuse_on_cluster
from pipelines.plan.phases import PhaseCosts, teacher_bytes
from pipelines.plan.push import refuse_apart
from pipelines.plan.simulate import SimulatedStep, role_timeline, simulate_steps
from pipelines.plan.spec import ClusterSpec
from pipelines.propose.text import render_on_one_line
from pipelines.sizing.auto import choose_numbers, describe_numbers
from pipelines.sizing.cache import cache_bytes, cache_tokens
from pipelines.sizing.gpu_memory import MemoryRoom, count_gpus, fits_machine, memory_rooms, refuse_idle_gpus
from pipelines.sizing.memory import fullest_workers, refuse_no_room, target_bytes
from pipelines.sizing.parts import MemoryPart, worker_parts
from pipelines.sizing.target_log import estimate_log_bytes, estimate_step_bytes

SIMULATED = 20
"""Most steps that are simulated; all others are taken to be like them."""
HOUR = 3600
"""Seconds."""
ROW = 100
"""Bytes of a row in addition to its tokens: its id, its span, and its place in the dictionary. See "Rows on the way" in docs/architecture.md."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Transfer:
    """A transfer of one step."""

    what: str
    link: str
    nbytes: float
    """The sum over all workers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RoleRow:
    """Load of the devices of one role."""

    name: str
    workers: int
    devices: float
    """Devices of one worker."""
    busy: float
    """Share of the time in which a worker computes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PhasePlan:
    """Seconds of one phase of a step on its slowest worker, the mean over the simulated steps."""

    name: str
    seconds: float
    compute: float
    memory: float
    link: float
    overhead: float
    limit: str
    """Name of the largest of these four."""
    flops: float
    """FLOPs of all workers, padding left out."""


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
    """Training steps of all rounds."""
    samples: int
    """Responses of a step."""
    prompt: int
    """Tokens of a prompt."""
    response: float
    """Mean tokens of a response."""
    sequences: float
    """Mean sequences in an engine's step."""
    memory: tuple[MemoryPart, ...]
    fullest: dict[str, int]
    """Role -> bytes of one worker and its process at its fullest, where there are no GPUs."""
    room: tuple[MemoryRoom, ...]
    traffic: tuple[Transfer, ...]
    log: int
    """Most bytes of the target log, before a checkpoint frees them."""
    phases: tuple[PhasePlan, ...]
    roles: tuple[RoleRow, ...]
    step_s: float
    hours: float
    """Hours of all steps, without the start, exams and checkpoints."""
    devices: float
    """GPUs of the cluster; 0 if it has none."""
    device_hours: float
    limit: str
    """The longest phase, and what limits it."""
    fits: bool
    notes: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def make_plan(config: PipelineConfig, spec: ClusterSpec) -> MergePlan:
    """Plan a merge. Raises: OpdError for a model without a config or a formula, or a pipeline that a merge would refuse here."""
    placement_notes = _placement_notes(config, spec)
    spec, config = spec.with_own_overheads(), apply_placement(config, spec)
    models = _read_models(config)
    written, config = config, choose_numbers(config, models.merge, spec.hardware)
    hardware = Hardware.from_config(config, spec)
    refuse_apart(config, spec, hardware)
    cache = cache_bytes(config, models.merge, spec.machine.gpu_memory)
    slots, notes = _engine_slots(config, models, spec, cache)
    costs = PhaseCosts(config=config, spec=spec, models=models, hardware=hardware, slots=max(1, slots))
    total = sum(round_config.trainer.steps for round_config in split_rounds(config))
    steps = simulate_steps(costs, spec.lengths, min(SIMULATED, total))
    lengths = draw_responses(config, models, spec.lengths, 0)
    phases = tuple(_phase_row(name, steps, flops) for name, flops in costs.phase_flops(lengths).items())
    step_s = sum(step.wall for step in steps) / len(steps)
    room = tuple(memory_rooms(config, models.merge, spec.hardware))
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
            worker_parts(config, models.merge, on_gpus=spec.machine.gpus > 0, cache=cache, rows=models.target_rows)
        ),
        fullest={} if spec.machine.gpus else fullest_workers(config, models.merge),
        room=room,
        traffic=tuple(_step_traffic(costs, lengths)),
        log=estimate_log_bytes(config, models.merge),
        phases=phases,
        roles=tuple(_role_rows(steps, hardware)),
        step_s=step_s,
        hours=total * step_s / HOUR,
        devices=_spec_gpus(spec),
        device_hours=total * step_s / HOUR * _spec_gpus(spec),
        limit=_limiting_phase(phases),
        fits=slots > 0 and fits_machine(config, models.merge, spec.hardware),
        notes=(*models.notes, *notes, *placement_notes, *_plan_notes(written, config, models, spec)),
    )


def fits_cluster(config: PipelineConfig, spec: ClusterSpec) -> bool:
    """Return `make_plan(config, spec).fits` without a simulated step. Raises: OpdError, as `make_plan` does."""
    config = apply_placement(config, spec)
    models = _read_models(config)
    config = choose_numbers(config, models.merge, spec.hardware)
    hardware = Hardware.from_config(config, spec)
    refuse_apart(config, spec, hardware)
    slots, _ = _engine_slots(config, models, spec, cache_bytes(config, models.merge, spec.machine.gpu_memory))
    return slots > 0 and fits_machine(config, models.merge, spec.hardware)


def _read_models(config: PipelineConfig) -> Models:
    """Return the models of a pipeline. Raises: OpdError, also for GPUs and sizes that a merge would refuse."""
    refuse_idle_gpus(config)
    models = read_models(config)
    refuse_no_room(config, models.merge.scorers)
    return models


def _spec_gpus(spec: ClusterSpec) -> float:
    return spec.devices if spec.machine.gpus else 0


def _engine_slots(config: PipelineConfig, models: Models, spec: ClusterSpec, cache: float) -> tuple[int, list[str]]:
    """Return how many sequences an engine writes at a time, and notes on that: `rollout.max_num_seqs`, or as many sequences of mean
    length as its cache of `cache` bytes on each device holds. With 0 the merge does not fit; the caller then plans it as if there
    were room for one, to say what is missing."""
    lengths = draw_responses(config, models, spec.lengths, 0)
    sequence_tokens = lengths.tokens / len(lengths.responses)
    room = int(cache_tokens(config, models.student.attention, spec.machine.gpus, cache) / sequence_tokens)
    max_sequences = config.rollout.max_num_seqs
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


def _step_traffic(costs: PhaseCosts, lengths: StepLengths) -> Iterator[Transfer]:
    """Yield the transfers of a step between processes, as far as they are large."""
    config, models = costs.config, costs.models
    shape, merge = models.student, models.merge
    rows, responses = len(lengths.responses), sum(lengths.responses)
    # An id takes 4 bytes; a response token has its log-prob too.
    rollouts = rows * ROW + 4 * rows * lengths.prompt + 8 * responses
    yield Transfer(what="rollouts", link="engines → driver → teachers", nbytes=rollouts)
    on_base = all(isinstance(section, TrainerTeachers) for section in config.engines)
    if models.scorers and not on_base:
        teachers_per_row = models.target_rows / rows
        targets = teachers_per_row * (rollouts + target_bytes(config, merge) * responses)
        yield Transfer(what="target rows", link="teachers → driver, log → ranks", nbytes=targets)
        loaded = sum(teacher_bytes(config, models).values())
        yield Transfer(what="teachers' weights", link="host or storage → scoring workers", nbytes=loaded)
    if models.scorers:
        link = "driver → disk" if on_base else "scoring workers → disk"
        yield Transfer(what="target log, at most", link=link, nbytes=estimate_step_bytes(config, merge))
    ranks, copy = config.trainer.ranks, DTYPE_BYTES[config.trainer.dtype]
    if ranks > 1:
        trained = costs.train_seconds(lengths)
        micro_batches = len(trained.micro_batches)
        # Each rank gets what the other ranks hold: summed over the ranks, all bytes ranks - 1 times.
        gathered = trained.gathers * shape.parameters * copy * (ranks - 1)
        summed = micro_batches * merge.trained * DTYPE_BYTES[config.trainer.grad_accum_dtype] * (ranks - 1)
        yield Transfer(what="gathered weights", link="rank ↔ rank", nbytes=gathered)
        yield Transfer(what="summed gradients", link="rank ↔ rank", nbytes=summed)
    way = "rank 0 → object stores → engines" if costs.push.over_network else "rank 0 → engines"
    yield Transfer(what="new weights", link=way, nbytes=costs.push.sent)


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


def _plan_notes(written: PipelineConfig, config: PipelineConfig, models: Models, spec: ClusterSpec) -> Iterator[str]:
    """Yield notes on the numbers that the pipeline as `written` leaves open, on what the plan leaves out, and on what it plans although
    `opd merge` does not do it yet."""
    if numbers := describe_numbers(written, config):
        yield f"auto: {numbers}"
    with_episodes = [name for name, domain in config.domains.items() if domain.has_episodes]
    if with_episodes:
        yield f"planned as single responses although they are episodes of turns: {', '.join(with_episodes)}"
    if isinstance(config.rounds, list):
        yield "every round is planned like the first"
    for name in config.objective.judging_models:
        yield f"the {name}'s memory is planned, its time is not"
    if config.rollout.engine == TRANSFORMERS_ENGINE:
        yield "responses are planned as vLLM writes them; rollout.engine transformers is far slower, and `opd check` measures it"
    if any(section.elsewhere for section in config.engines):
        yield "teachers elsewhere are planned as if they scored at once"
    gpus = count_gpus(config, models.merge)
    if spec.machine.gpus and gpus > spec.devices:
        yield f"{gpus} devices are placed, the cluster has {spec.devices}"
    refusal = _find_refusal(config, spec)
    if refusal:
        yield f"`opd merge` refuses this placement: {refusal}"


def _placement_notes(config: PipelineConfig, spec: ClusterSpec) -> Iterator[str]:
    """Yield the keys, if any, by which a pipeline would have the placement of the spec."""
    changes = placement_keys(config, spec) if spec.machine.gpus else {}
    keys = [
        f"--set {section}.{key}={render_on_one_line(value)}"
        for section, values in changes.items()
        for key, value in values.items()
        if getattr(getattr(config, section), key, None) != value
    ]
    if keys:
        yield f"planned in the placement of {spec.name}; `opd merge` has it with {' '.join(keys)}"


def _find_refusal(config: PipelineConfig, spec: ClusterSpec) -> str | None:
    """Return on one line why `opd merge` would refuse to place the workers on the GPUs of the spec; None if it would not, or if there are
    none."""
    if not spec.machine.gpus:
        return None
    try:
        refuse_on_cluster(config, spec)
    except ConfigError as error:
        return " ".join(str(error).split())
    return None
