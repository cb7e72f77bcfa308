"""The directories that workers search for modules, in the order in which the driver does."""

from __future__ import annotations

import sys
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

from opd import PACKAGES, ROOT


def make_job_config() -> Any:
    """Make Ray's `JobConfig` for a job whose workers search the driver's own path first and the current directory last.

    Ray puts the current directory first: a `teachers.py` there would be imported in place of our package, an `opd.py` in place of us.
    """
    from ray.job_config import JobConfig

    class DriverPath(JobConfig):
        def _serialize(self) -> Any:
            # `ray.init` calls this last, after it has added its own directories to this attribute, which is private in Ray. Workers
            # insert the entries one by one at the front of their path, so the list goes reversed.
            self._py_driver_sys_path = list(reversed(order_worker_path()))
            return super()._serialize()

    return DriverPath()


def order_worker_path() -> list[str]:
    """Return the directories of the driver's path in the order in which workers search them.

    First come the entries of `sys.path` without those that hold a package named like one of ours; then ROOT, the directory that has our
    packages; then the entries that were left out; last the current directory. ROOT may be missing from `sys.path`: an editable install
    finds us by a hook, which Python asks only after the whole path. `opd` need not be in PACKAGES: an entry that holds another `opd`
    before ours would have been imported in place of this module.
    """
    entries = [entry for entry in sys.path if entry]  # an empty entry is the current directory, which comes last
    shadowing = [e for e in entries if e != ROOT and any(_has_package(e, package) for package in PACKAGES)]
    return [*(entry for entry in entries if entry not in shadowing), ROOT, *shadowing, str(Path.cwd())]


def _has_package(entry: str, package: str) -> bool:
    spec = PathFinder.find_spec(package, [entry])
    # A folder without __init__.py has a spec without origin; it shadows nothing.
    return spec is not None and spec.origin is not None
