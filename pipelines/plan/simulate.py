"""The schedule of a merge, event by event, over the first of its steps.

    sync           write k ─→ score k ─→ train k ─→ push
    one_step_off   write k+1 beside score k ─→ train k, then push

With `schedule.overlap` a micro-batch begins as soon as its share of the rows is scored.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from opd.config.pipeline import is_overlapped
from pipelines.plan.cost import Seconds
from pipelines.plan.engine import EngineTimeline
from pipelines.plan.lengths import StepLengths, draw_responses
from pipelines.plan.phases import StepCost, TrainingCost
from pipelines.plan.spec import LengthsSpec

PHASES = ("rollout", "score", "train", "sync")


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedStep:
    """One step of the schedule."""

    wall: float
    """Seconds from the record of the step before to its own."""
    phases: dict[str, Seconds]
    """The slowest worker of each phase."""
    busy: dict[str, float]
    """Role -> seconds that one of its workers computes, on average."""
    response_tokens: int
    tokens: int
    engine_steps: int
    sequences: float
    """Mean sequences of an engine's step."""


def simulate_steps(work: StepCost, lengths: LengthsSpec, steps: int) -> list[SimulatedStep]:
    """The first steps of the merge. The same lengths give the same steps."""
    drawn = [draw_responses(work.config, work.models, lengths, number) for number in range(steps + 1)]
    return [_simulate_step(work, now, after) for now, after in pairwise(drawn)]


def _simulate_step(work: StepCost, now: StepLengths, after: StepLengths) -> SimulatedStep:
    config = work.config
    writes_ahead = config.schedule.mode == "one_step_off"
    timelines = work.rollout_seconds(after if writes_ahead else now)
    scored, trained, pushed = work.score(now), work.train_seconds(now), work.push_seconds(now)
    phases = {
        "rollout": _slowest_worker([timeline.spent for timeline in timelines]),
        "score": _slowest_worker(scored),
        "train": trained.spent,
        "sync": pushed,
    }
    taught = _overlapped_seconds(work, phases["score"].total, trained)
    writing = phases["rollout"].total
    # Devices that roles share do one thing at a time; CPU cores are divided between them instead.
    apart = writes_ahead and not (work.hardware.shared and work.spec.machine.gpus)
    phase_wall = writing + taught
    if apart:
        together, crowd = min(writing, taught), work.hardware.crowd
        phase_wall = max(writing, taught) + (crowd - 1) * together
        phases = _slow_down_phases(phases, together, crowd)
    return SimulatedStep(
        wall=phase_wall + pushed.total,
        phases=phases,
        busy={
            "rollout": _mean_worker([timeline.spent for timeline in timelines], work.hardware.rollout.workers),
            "teachers": _mean_worker(scored, work.hardware.teachers.workers),
            "trainer": trained.spent.total,
        },
        response_tokens=sum(now.responses),
        tokens=now.tokens,
        engine_steps=max((timeline.steps for timeline in timelines), default=0),
        sequences=_mean_sequences(timelines),
    )


def _slow_down_phases(phases: dict[str, Seconds], together: float, crowd: float) -> dict[str, Seconds]:
    """The phases as they last where the engines, for so many seconds of their work, share cores with scoring and training."""
    shared_seconds = {"rollout": together, "score": together, "train": max(0.0, together - phases["score"].total)}
    slowed = dict(phases)
    for name, overlap in shared_seconds.items():
        alone = phases[name].total
        slowed[name] = phases[name].times(1 + (crowd - 1) * min(alone, overlap) / alone) if alone else phases[name]
    return slowed


def _overlapped_seconds(work: StepCost, scoring: float, trained: TrainingCost) -> float:
    """Seconds from the first row that is scored to the end of the optimiser's step."""
    if not is_overlapped(work.config) or work.hardware.shared:
        return scoring + trained.spent.total
    parts, clock = len(trained.micro_batches), 0.0
    for number, micro_batch in enumerate(trained.micro_batches, start=1):
        clock = max(clock, scoring * number / parts) + micro_batch.total
    return clock + trained.last.total


def role_timeline(steps: Sequence[SimulatedStep]) -> Iterator[tuple[str, float, float]]:
    """(role, its busy share, seconds that it waits) over the steps."""
    wall = sum(step.wall for step in steps)
    for role in ("rollout", "teachers", "trainer"):
        busy = sum(step.busy[role] for step in steps)
        yield role, busy / wall, (wall - busy) / len(steps)


def _slowest_worker(workers: Sequence[Seconds]) -> Seconds:
    return max(workers, key=lambda seconds: seconds.total, default=Seconds())


def _mean_worker(workers: Sequence[Seconds], count: int) -> float:
    return sum(seconds.total for seconds in workers) / count


def _mean_sequences(timelines: Sequence[EngineTimeline]) -> float:
    steps = sum(timeline.steps for timeline in timelines)
    return sum(timeline.sequences * timeline.steps for timeline in timelines) / max(1, steps)
