"""What the benchmarks share: facts about the machine, and memory given back before a measurement."""

from __future__ import annotations

import contextlib
import ctypes
import os
import platform
from importlib.metadata import version
from pathlib import Path
from typing import Any


def machine(threads: int, *packages: str) -> dict[str, Any]:
    """What the figures depend on."""
    models = [s for s in Path("/proc/cpuinfo").read_text().splitlines() if s.startswith("model name")]
    return {
        "cpu": models[0].split(":", 1)[1].strip() if models else platform.processor(),
        "cores": os.cpu_count(),
        "threads": threads,
        "python": platform.python_version(),
        **{name: version(name) for name in packages},
        "load_before": os.getloadavg(),
    }


def trim() -> None:
    """Give freed memory back to the system."""
    with contextlib.suppress(OSError, AttributeError):  # a libc without malloc_trim
        ctypes.CDLL(None).malloc_trim(0)
