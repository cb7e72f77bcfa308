"""The directories that workers search for modules, in the order in which the driver does."""

from __future__ import annotations

import sys
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

from opd import PACKAGES, ROOT


def job_config() -> Any:
    """Return Ray's `JobConfig` of a job whose workers search the driver's own path first and the current directory last.

    Ray puts the current directory first: a `teachers.py` that lies there would stand in for our package, and an `opd.py` would be run.
    """
    from ray.job_config import JobConfig

    class DriverPath(JobConfig):
        def _serialize(self) -> Any:
            # The last moment before it is sent, after Ray has added its directories. Workers insert them one by one in front of their
            # own path, so the last one comes first. An empty entry is the current directory.
            self._py_driver_sys_path = list(reversed(worker_path()))
            return super()._serialize()

    return DriverPath()


def worker_path() -> list[str]:
    """Return the driver's path, and behind it our own place, what has a package of one of our names, and the current directory.

    Our place may be on no path: an editable install finds us by a hook, which Python asks only after all of its path.
    """
    entries = [entry for entry in sys.path if entry]
    hiding = [entry for entry in entries if entry != ROOT and any(_has_package(entry, package) for package in PACKAGES)]
    return [*(entry for entry in entries if entry not in hiding), ROOT, *hiding, str(Path.cwd())]


def _has_package(entry: str, package: str) -> bool:
    spec = PathFinder.find_spec(package, [entry])
    return spec is not None and spec.origin is not None  # a folder without __init__.py hides nothing
