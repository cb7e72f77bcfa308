"""Simulate the schedule of a merge over the first of its steps.

    sync           write k ─→ score k ─→ train k ─→ push
    one_step_off   write k+1 while the others do score k ─→ train k, then push

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
from pipelines.plan.phases import PhaseCosts, TrainingCost
from pipelines.plan.spec import LengthsSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedStep:
    """One step of the schedule."""

    wall: float
    """Seconds from the record of the step before to the record of this one."""
    phases: dict[str, Seconds]
    """Phase -> time of its slowest worker."""
    busy: dict[str, float]
    """Role -> seconds that one of its workers works, on average."""
    response_tokens: int
    tokens: int
    """Prompt and response tokens of all rows."""
    engine_steps: int
    """Decode steps of the engine that has most of them."""
    sequences: float
    """Mean number of sequences in a decode step."""


def simulate_steps(costs: PhaseCosts, lengths: LengthsSpec, steps: int) -> list[SimulatedStep]:
    """Return the first steps of the merge. The same lengths, with their seed, give the same steps."""
    step_lengths = [draw_responses(costs.config, costs.models, lengths, number) for number in range(steps + 1)]
    return [_simulate_step(costs, now, after) for now, after in pairwise(step_lengths)]


def _simulate_step(costs: PhaseCosts, now: StepLengths, after: StepLengths) -> SimulatedStep:
    """Return one step; `now` are its lengths, `after` those of the next step."""
    writes_ahead = costs.config.schedule.mode == "one_step_off"
    timelines = costs.rollout_seconds(after if writes_ahead else now)
    scoring, training, push = costs.score_seconds(now), costs.train_seconds(now), costs.push_seconds(now)
    phases = {
        "rollout": _slowest_worker([timeline.spent for timeline in timelines]),
        "score": _slowest_worker(scoring),
        "train": training.spent,
        "sync": push,
    }
    learn_s = _score_and_train_seconds(costs, phases["score"].total, training)
    write_s = phases["rollout"].total
    phases_s = write_s + learn_s
    # GPUs that roles share do one thing at a time, but roles prepare calls side by side; CPU cores are divided between them instead.
    if writes_ahead and costs.hardware.shared and costs.spec.machine.gpus:
        phases_s = max(write_s, learn_s, sum(phase.on_device for phase in phases.values()))
    elif writes_ahead:
        overlap_s, slowdown = min(write_s, learn_s), costs.hardware.slowdown
        phases_s = max(write_s, learn_s) + (slowdown - 1) * overlap_s
        phases = _slow_down_phases(phases, overlap_s, slowdown)
    return SimulatedStep(
        wall=phases_s + push.total,
        phases=phases,
        busy={
            "rollout": _mean_worker([timeline.spent for timeline in timelines], costs.hardware.rollout.workers),
            "teachers": _mean_worker(scoring, costs.hardware.teachers.workers),
            "trainer": training.spent.total,
        },
        response_tokens=sum(now.responses),
        tokens=now.tokens,
        engine_steps=max((timeline.steps for timeline in timelines), default=0),
        sequences=_mean_sequences(timelines),
    )


def _slow_down_phases(phases: dict[str, Seconds], overlap_s: float, slowdown: float) -> dict[str, Seconds]:
    """Return the phases as they last if the engines share cores with scoring, and then with training, for the first `overlap_s`
    seconds of their work."""
    shared_s = {"rollout": overlap_s, "score": overlap_s, "train": max(0.0, overlap_s - phases["score"].total)}
    slowed = dict(phases)
    for name, seconds in shared_s.items():
        alone = phases[name].total
        slowed[name] = phases[name].times(1 + (slowdown - 1) * min(alone, seconds) / alone) if alone else phases[name]
    return slowed


def _score_and_train_seconds(costs: PhaseCosts, scoring: float, training: TrainingCost) -> float:
    """Return the seconds from the first row that is scored to the end of the optimiser's step. `scoring`: seconds of that phase."""
    if not is_overlapped(costs.config) or costs.hardware.shared:
        return scoring + training.spent.total
    whole, begun, clock = sum(micro_batch.total for micro_batch in training.micro_batches), 0.0, 0.0
    for micro_batch in training.micro_batches:
        # A micro-batch waits for its share of the scored rows, taken to be its share of the time, and for the micro-batch before it.
        begun += micro_batch.total
        clock = max(clock, scoring * begun / whole) + micro_batch.total
    return clock + training.last.total


def role_timeline(steps: Sequence[SimulatedStep]) -> Iterator[tuple[str, float, float]]:
    """Yield each role with the share of all steps in which it is busy, and the mean seconds of a step in which it waits."""
    wall = sum(step.wall for step in steps)
    for role in ("rollout", "teachers", "trainer"):
        busy = sum(step.busy[role] for step in steps)
        yield role, busy / wall, (wall - busy) / len(steps)


def _slowest_worker(workers: Sequence[Seconds]) -> Seconds:
    return max(workers, key=lambda seconds: seconds.total, default=Seconds())


def _mean_worker(workers: Sequence[Seconds], count: int) -> float:
    """Return the mean seconds of `count` workers; those that had nothing to do are not among `workers`."""
    return sum(seconds.total for seconds in workers) / count


def _mean_sequences(timelines: Sequence[EngineTimeline]) -> float:
    """Return the mean number of sequences in a decode step of all engines."""
    steps = sum(timeline.steps for timeline in timelines)
    return sum(timeline.sequences * timeline.steps for timeline in timelines) / max(1, steps)
