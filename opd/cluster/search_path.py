"""The directories that workers search for modules, in the order in which the driver does."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any


def job_config() -> Any:
    """Return Ray's `JobConfig` of a job whose workers search the driver's own path first and the current directory last.

    Ray puts the current directory first: a `teachers.py` that lies there would stand in for our package, and an `opd.py` would be run.
    """
    from ray.job_config import JobConfig

    class DriverPath(JobConfig):
        def _serialize(self) -> Any:
            # The last moment before it is sent, after Ray has added its directories. Workers insert them one by one in front of their
            # own path, so the last one comes first. An empty entry is the current directory.
            self._py_driver_sys_path = [str(Path.cwd()), *reversed([entry for entry in sys.path if entry])]
            return super()._serialize()

    return DriverPath()
