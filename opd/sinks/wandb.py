"""Weights & Biases. Its own settings (`wandb login`, WANDB_MODE=offline) decide on account and server."""

from __future__ import annotations

from pathlib import Path
from types import TracebackType
from uuid import uuid4

from opd.errors import RunError
from opd.records.step import StepRecord
from opd.run.paths import RunPaths
from opd.sinks.run_id import load_or_create_id
from opd.sinks.scalars import flatten_record


class WandbSink:
    """One run of the project `project`; its files lie under `wandb/` in the run directory.

    Raises: RunError if the service refuses or cannot be reached at the start. Later numbers are sent in the background.
    """

    def __init__(self, project: str, run_dir: Path, last_step: int) -> None:
        import wandb

        try:
            self._run = wandb.init(
                project=project,
                name=run_dir.name,
                id=load_or_create_id(RunPaths(run_dir).wandb_id, lambda: uuid4().hex[:12]),
                resume="allow",
                dir=str(run_dir),
            )
        except wandb.errors.Error as error:
            raise RunError(f"logging.wandb: {error}") from error

    def step(self, record: StepRecord) -> None:
        """Log the step, unless the service has it already: it does not let a step be replaced."""
        if record.step >= self._run.step:
            self._run.log(flatten_record(record), step=record.step)

    def __enter__(self) -> WandbSink:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._run.finish(exit_code=int(kind is not None))
