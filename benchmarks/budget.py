"""Training that ends at a number of tokens: `benchmarks.drift` and `benchmarks.rewards` compare ways of training by it."""

from __future__ import annotations

import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from benchmarks.asked import claim
from opd.config import PipelineConfig
from opd.records.step import StepRecord
from opd.run import checkpoints
from opd.run.metrics import MetricsFile, count_trained_tokens
from opd.run.paths import RunPaths
from pipelines.interrupts import Interrupted, Interrupts, interrupts
from pipelines.merging import run as merging
from pipelines.merging.callbacks import MergeCallbacks


class Budget:
    """A sink that asks the merge to leave once it has trained on enough tokens."""

    def __init__(self, tokens: int, taken: Sequence[StepRecord] = ()) -> None:
        """`taken`: the steps of earlier sittings."""
        self._tokens = tokens
        self._by_step = {record.step: count_trained_tokens(record) for record in taken}
        self._interrupts = Interrupts()

    @property
    def left(self) -> int:
        """Tokens; below 0 if the last step had more than were left."""
        return self._tokens - sum(self._by_step.values())

    def step(self, record: StepRecord) -> None:
        """Count a step. One that is taken again, because a worker died, counts once, and so do those after it."""
        self._by_step = {step: tokens for step, tokens in self._by_step.items() if step < record.step}
        self._by_step[record.step] = count_trained_tokens(record)
        if self.left <= 0:
            self._interrupts.number = signal.SIGINT  # as Ctrl-C would

    @contextmanager
    def listening(self) -> Iterator[Interrupts]:
        """Yield what the merge asks whether to leave; Ctrl-C finishes a step too."""
        with interrupts() as self._interrupts:
            yield self._interrupts


def train_within(tokens: int, config: PipelineConfig, paths: RunPaths) -> None:
    """Begin a merge or go on with it, until it has trained on so many tokens or taken its last step.

    At the budget there is a checkpoint and no report; after the last step there is a report.
    Raises: SystemExit after Ctrl-C, and if a run that is there was begun with another pipeline or budget.
    """
    claim(paths.root, {"tokens": tokens, **config.model_dump(mode="json")})
    if paths.report.exists():
        return
    budget = Budget(tokens, taken(paths))
    around = MergeCallbacks(signals=budget.listening, sinks=(budget,))
    try:
        if not paths.root.exists():
            merging.begin(config, paths.root).carry_out(around)
        elif budget.left > 0:
            merging.reopen(paths.root).carry_out(around)
    except Interrupted as end:
        if budget.left > 0:
            raise SystemExit(f"{paths.root}: interrupted after a whole step; the same command goes on") from None
        print(end)


def taken(paths: RunPaths) -> list[StepRecord]:
    """The steps until the last checkpoint: those after it are taken again."""
    last = max(checkpoints.list_checkpoint_steps(paths.checkpoints), default=0)
    return [record for record in MetricsFile(paths.metrics).read() if record.step <= last]
