"""TensorBoard's event files, under `tensorboard/` in the run directory: `tensorboard --logdir runs`."""

from __future__ import annotations

from pathlib import Path
from types import TracebackType
from typing import Any

from opd.records.step import StepRecord
from opd.run.paths import RunPaths
from opd.sinks.scalars import flatten_record


class TensorBoardSink:
    """Writes event files. Every start opens a new one, which tells TensorBoard to forget the steps after `last_step`."""

    def __init__(self, enabled: bool, run_dir: Path, last_step: int) -> None:
        from tensorboard.compat.proto.summary_pb2 import Summary
        from torch.utils.tensorboard import SummaryWriter

        self._summary = Summary
        self._writer: Any = SummaryWriter(str(RunPaths(run_dir).tensorboard), purge_step=last_step + 1)

    def step(self, record: StepRecord) -> None:
        """Write the step to disk before returning, so that a killed run shows it.

        All numbers are written as one event. `add_scalar` would make an event of each, which took seven times as long.
        """
        values = [self._summary.Value(tag=name, simple_value=value) for name, value in flatten_record(record).items()]
        self._writer.file_writer.add_summary(self._summary(value=values), record.step)
        self._writer.flush()

    def __enter__(self) -> TensorBoardSink:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._writer.close()
