"""MLflow: a tracking server, or a local store such as `sqlite:///mlflow.db`."""

from __future__ import annotations

import time
import warnings
from pathlib import Path
from types import TracebackType

from opd.errors import RunError
from opd.records.step import StepRecord
from opd.run.paths import RunPaths
from opd.sinks.run_id import load_or_create_id
from opd.sinks.scalars import flatten_record

EXPERIMENT = "opd-merge"


class MLflowSink:
    """One run of the experiment `opd-merge` under the tracking URI.

    Raises: RunError if the store cannot be used at the start. If it fails later, that is only a warning, because the numbers
    are in metrics.jsonl too.
    """

    def __init__(self, uri: str, run_dir: Path, last_step: int) -> None:
        from mlflow import MlflowClient
        from mlflow.entities import Metric
        from mlflow.exceptions import MlflowException

        self._metric, self._store_error = Metric, MlflowException
        self._client = MlflowClient(tracking_uri=uri)
        try:
            self._id = load_or_create_id(RunPaths(run_dir).mlflow_id, lambda: self._create_run(run_dir.name))
            self._client.update_run(self._id, status="RUNNING")
            history = self._client.get_metric_history(self._id, "step/loss")
        except MlflowException as error:
            raise RunError(f"logging.mlflow: {uri}: {error}") from error
        self._last_sent_step = max((metric.step for metric in history), default=0)

    def _create_run(self, name: str) -> str:
        experiment_record = self._client.get_experiment_by_name(EXPERIMENT)
        experiment = (
            experiment_record.experiment_id if experiment_record else self._client.create_experiment(EXPERIMENT)
        )
        return self._client.create_run(experiment, run_name=name).info.run_id

    def step(self, record: StepRecord) -> None:
        """Log the step, unless the store has it already; MLflow would keep both."""
        step = record.step
        if step <= self._last_sent_step:
            return
        now = int(1000 * time.time())
        metrics = [self._metric(name, value, now, step) for name, value in flatten_record(record).items()]
        try:
            self._client.log_batch(self._id, metrics=metrics)
        except self._store_error as error:
            warnings.warn(f"logging.mlflow: step {step} was not taken: {error}", stacklevel=2)
            return
        self._last_sent_step = step

    def __enter__(self) -> MLflowSink:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._client.set_terminated(self._id, "FINISHED" if kind is None else "FAILED")
