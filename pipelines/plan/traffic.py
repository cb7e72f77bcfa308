"""Bytes of one step, by the link that they take."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from opd.settings.strict import DTYPE_BYTES
from pipelines.plan.lengths import StepLengths
from pipelines.plan.phases import StepCost, teacher_bytes
from pipelines.sizing.memory import target_bytes

ROW = 100
"""Bytes of a row beside its tokens: its id, its span, and its place in the dictionary. See "Rows on the way" in docs/architecture.md."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sent:
    """A transfer of one step."""

    what: str
    link: str
    nbytes: float
    """The sum over all workers."""


def step_traffic(work: StepCost, lengths: StepLengths) -> Iterator[Sent]:
    """Everything of size that a step moves between processes."""
    config, models = work.config, work.models
    shape, merge = models.student, models.merge
    rows, responses = len(lengths.responses), sum(lengths.responses)
    rollouts = rows * ROW + 4 * rows * lengths.prompt + 8 * responses
    yield Sent(what="rollouts", link="engines → driver → teachers", nbytes=rollouts)
    if models.scorers:
        opinions = models.opinions / rows
        targets = opinions * (rollouts + target_bytes(config, merge) * responses)
        yield Sent(what="target rows", link="teachers → driver, log → ranks", nbytes=targets)
        turns = teacher_bytes(config, models)
        yield Sent(what="teachers' weights", link="host or storage → scoring workers", nbytes=sum(turns.values()))
    ranks, copy = config.trainer.ranks, DTYPE_BYTES[config.trainer.dtype]
    if ranks > 1:
        trained = work.train_seconds(lengths)
        parts = len(trained.micro_batches)
        gathered = trained.gathers * shape.parameters * copy * (ranks - 1)
        summed = parts * merge.trained * DTYPE_BYTES[config.trainer.grad_accum_dtype] * (ranks - 1)
        yield Sent(what="gathered weights", link="rank ↔ rank", nbytes=gathered)
        yield Sent(what="summed gradients", link="rank ↔ rank", nbytes=summed)
    way = "rank 0 → object stores → engines" if work.push.over_network else "rank 0 → engines"
    yield Sent(what="new weights", link=way, nbytes=work.push.sent)
