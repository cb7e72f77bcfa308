"""`opd plan --measure`: the rates of this machine, from a matrix product, a copy and small calls."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

from opd.files import atomic_write_text
from pipelines.inputs.memory import machine_bytes
from pipelines.plan.spec import ClusterSpec, load_spec

SECONDS = 1.0
"""How long each rate is measured."""
ROWS, WIDTH, IDS = 512, 576, 49152
"""The product: states with the output head of a model such as SmolLM2. Every factor of two-cores is a share of it."""
COPIED = 128 << 20
"""Bytes that are copied at a time: more than any cache holds."""
SMALL, CALLS = 8, 1000
"""The small operation, a product of a row of so many numbers, and how often it is called at a time."""


def measured_spec(base: ClusterSpec) -> ClusterSpec:
    """The spec with this machine's cores, memory and rates; a machine without GPUs."""
    import torch

    torch.set_num_threads(len(os.sched_getaffinity(0)))
    rates = {
        "float32": _products(torch, torch.float32),
        "bfloat16": _products(torch, torch.bfloat16),
        "memory": _copies(torch),
        "calls": _calls(torch),
    }
    machine = {"cores": len(os.sched_getaffinity(0)), "memory": machine_bytes()}
    data = base.model_dump() | {"name": "this-machine", "machines": 1, "machine": machine, "rates": rates}
    # Processes of one machine pass bytes on by copying them.
    data["links"] |= {"inside": rates["memory"] / 2, "between": rates["memory"] / 2, "load": rates["memory"] / 2}
    return ClusterSpec.model_validate(data)


def measure_to(path: Path) -> ClusterSpec:
    """Measure this machine and write its spec; factors, overheads and lengths of a file that is there stay as they are."""
    spec = measured_spec(load_spec(str(path) if path.is_file() else "two-cores"))
    atomic_write_text(path, yaml.safe_dump(spec.model_dump(mode="json", exclude_none=True), sort_keys=False))
    return spec


def _products(torch: Any, dtype: Any) -> float:
    """FLOP/s of a matrix product, the best of one second's."""
    hidden_N_D, head_V_D = torch.randn(ROWS, WIDTH).to(dtype), torch.randn(IDS, WIDTH).to(dtype)
    return 2 * ROWS * WIDTH * IDS / _quickest(lambda: hidden_N_D @ head_V_D.T)


def _copies(torch: Any) -> float:
    """Bytes a second that a copy reads and writes."""
    source = torch.ones(COPIED, dtype=torch.uint8)
    target = torch.empty_like(source)
    return 2 * COPIED / _quickest(lambda: target.copy_(source))


def _calls(torch: Any) -> float:
    """Small operations a second that one core begins: Python's part and torch's, no arithmetic worth the name."""
    row_1_D, square_D_D = torch.ones(1, SMALL), torch.ones(SMALL, SMALL)

    def some() -> None:
        for _ in range(CALLS):
            torch.nn.functional.linear(row_1_D, square_D_D)

    with torch.inference_mode():
        return CALLS / _quickest(some)


def _quickest(work: Callable[[], Any]) -> float:
    """Seconds of the quickest of the runs that a second has room for."""
    work()
    end, best = time.perf_counter() + SECONDS, float("inf")
    while time.perf_counter() < end:
        begun = time.perf_counter()
        work()
        best = min(best, time.perf_counter() - begun)
    return best
