"""The schedule of a merge, event by event, over the first of its steps.

    sync           write k ─→ score k ─→ train k ─→ push
    one_step_off   write k+1 beside score k ─→ train k, then push

With `schedule.overlap` a micro-batch begins as soon as its share of the rows is scored.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from opd.config.pipeline import overlaps
from pipelines.plan.cost import Seconds
from pipelines.plan.engine import Wrote
from pipelines.plan.lengths import Written, written
from pipelines.plan.phases import Trained, Work
from pipelines.plan.spec import LengthsSpec

PHASES = ("rollout", "score", "train", "sync")


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
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


def simulate(work: Work, lengths: LengthsSpec, steps: int) -> list[Step]:
    """The first steps of the merge. The same lengths give the same steps."""
    drawn = [written(work.config, work.models, lengths, number) for number in range(steps + 1)]
    return [_step(work, now, after) for now, after in pairwise(drawn)]


def _step(work: Work, now: Written, after: Written) -> Step:
    config = work.config
    beside = config.schedule.mode == "one_step_off"
    wrote = work.rollout(after if beside else now)
    scored, trained, pushed = work.score(now), work.train(now), work.sync(now)
    phases = {
        "rollout": _slowest([one.spent for one in wrote]),
        "score": _slowest(scored),
        "train": trained.spent,
        "sync": pushed,
    }
    taught = _taught(work, phases["score"].total, trained)
    writing = phases["rollout"].total
    # Devices that roles share do one thing at a time; CPU cores are divided between them instead.
    apart = beside and not (work.places.shared and work.spec.machine.gpus)
    both = writing + taught
    if apart:
        together, crowd = min(writing, taught), work.places.crowd
        both = max(writing, taught) + (crowd - 1) * together
        phases = _crowded(phases, together, crowd)
    return Step(
        wall=both + pushed.total,
        phases=phases,
        busy={
            "rollout": _mean([one.spent for one in wrote], work.places.rollout.workers),
            "teachers": _mean(scored, work.places.teachers.workers),
            "trainer": trained.spent.total,
        },
        response_tokens=sum(now.responses),
        tokens=now.tokens,
        engine_steps=max((one.steps for one in wrote), default=0),
        sequences=_sequences(wrote),
    )


def _crowded(phases: dict[str, Seconds], together: float, crowd: float) -> dict[str, Seconds]:
    """The phases as they last where the engines, for so many seconds of their work, share cores with scoring and training."""
    left = {"rollout": together, "score": together, "train": max(0.0, together - phases["score"].total)}
    found = dict(phases)
    for name, beside in left.items():
        alone = phases[name].total
        found[name] = phases[name].times(1 + (crowd - 1) * min(alone, beside) / alone) if alone else phases[name]
    return found


def _taught(work: Work, scoring: float, trained: Trained) -> float:
    """Seconds from the first row that is scored to the end of the optimiser's step."""
    if not overlaps(work.config) or work.places.shared:
        return scoring + trained.spent.total
    parts, clock = len(trained.micro_batches), 0.0
    for number, one in enumerate(trained.micro_batches, start=1):
        clock = max(clock, scoring * number / parts) + one.total
    return clock + trained.last.total


def timeline(steps: Sequence[Step]) -> Iterator[tuple[str, float, float]]:
    """(role, its busy share, seconds that it waits) over the steps."""
    wall = sum(step.wall for step in steps)
    for role in ("rollout", "teachers", "trainer"):
        busy = sum(step.busy[role] for step in steps)
        yield role, busy / wall, (wall - busy) / len(steps)


def _slowest(workers: Sequence[Seconds]) -> Seconds:
    return max(workers, key=lambda one: one.total, default=Seconds())


def _mean(workers: Sequence[Seconds], count: int) -> float:
    return sum(one.total for one in workers) / count


def _sequences(wrote: Sequence[Wrote]) -> float:
    steps = sum(one.steps for one in wrote)
    return sum(one.sequences * one.steps for one in wrote) / max(1, steps)
