"""Sinks: other tools that get a run's numbers besides `metrics.jsonl`. Each has a small file here and an entry in `SINKS`.

A sink is an `opd.interfaces.Sink` and a context manager; its package is imported when it is opened. A resume takes the steps
after the last checkpoint again, and each sink sees to it that no step is shown twice.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import Any

from opd.config.sections import LoggingConfig
from opd.errors import ConfigError
from opd.interfaces import Sink
from opd.sinks.mlflow import MLflowSink
from opd.sinks.tensorboard import TensorBoardSink
from opd.sinks.wandb import WandbSink

SINKS: dict[str, Callable[[Any, Path, int], AbstractContextManager[Sink]]] = {
    "tensorboard": TensorBoardSink,
    "wandb": WandbSink,
    "mlflow": MLflowSink,
}
"""Key of `logging` -> class of the sink; the key is also the name of the package that the sink needs.

A sink is made from the key's value, the run directory, and the last step whose record is kept. Later steps will come, perhaps
for the second time.
"""


def refuse_missing(config: LoggingConfig) -> None:
    """Refuse a sink whose package is not installed. Raises: ConfigError."""
    for key in _enabled_sinks(config):
        if importlib.util.find_spec(key) is None:
            raise ConfigError.at(
                f"logging.{key}",
                found=f"{getattr(config, key)}, and no package {key}",
                wanted=f"the package {key}, or no logging there",
                fix=f"pip install {key}, or --set logging.{key}={'false' if key == 'tensorboard' else 'null'}",
            )


@contextmanager
def open_sinks(config: LoggingConfig, run_dir: Path, last_step: int) -> Iterator[list[Sink]]:
    """Make a context with the sinks that the pipeline asks for. They are closed at its end, even after an error."""
    with ExitStack() as stack:
        yield [
            stack.enter_context(SINKS[key](getattr(config, key), run_dir, last_step)) for key in _enabled_sinks(config)
        ]


def _enabled_sinks(config: LoggingConfig) -> list[str]:
    return [key for key in SINKS if getattr(config, key)]
