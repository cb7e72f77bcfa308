"""Bytes of one step, by the link that they take."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from opd.settings.strict import DTYPE_BYTES
from pipelines.plan.lengths import StepLengths
from pipelines.plan.memory import target_bytes
from pipelines.plan.phases import StepCost, teacher_bytes

ROW = 100
"""Bytes of a row beside its tokens: its id, its span, and its place in the dictionary. See "Rows on the way" in docs/architecture.md."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Transfer:
    """A transfer of one step."""

    what: str
    link: str
    nbytes: float
    """The sum over all workers."""


def step_traffic(work: StepCost, lengths: StepLengths) -> Iterator[Transfer]:
    """Everything of size that a step moves between processes."""
    config, models = work.config, work.models
    shape, inputs = models.student, models.inputs
    rows, responses = len(lengths.responses), sum(lengths.responses)
    rollouts = rows * ROW + 4 * rows * lengths.prompt + 8 * responses
    yield Transfer(what="rollouts", link="engines → driver → teachers", nbytes=rollouts)
    if models.scorers:
        opinions = models.opinions / rows
        targets = opinions * (rollouts + target_bytes(config, models, responses))
        yield Transfer(what="target rows", link="teachers → driver, log → ranks", nbytes=targets)
        turns = teacher_bytes(config, models)
        yield Transfer(what="teachers' weights", link="host or storage → scoring workers", nbytes=sum(turns.values()))
    ranks, copy = config.trainer.ranks, DTYPE_BYTES[config.trainer.dtype]
    if ranks > 1:
        trained = work.train_seconds(lengths)
        parts = len(trained.micro_batches)
        gathered = trained.gathers * shape.parameters * copy * (ranks - 1)
        summed = parts * inputs.trained * DTYPE_BYTES[config.trainer.grad_accum_dtype] * (ranks - 1)
        yield Transfer(what="gathered weights", link="rank ↔ rank", nbytes=gathered)
        yield Transfer(what="summed gradients", link="rank ↔ rank", nbytes=summed)
    way = "rank 0 → object stores → engines" if work.push.over_network else "rank 0 → engines"
    yield Transfer(what="new weights", link=way, nbytes=work.push.sent)
