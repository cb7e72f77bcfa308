"""The benchmark of pushes without trainer and engine: its figures are medians, and ratios are taken within a round."""

from __future__ import annotations

import os
from dataclasses import asdict

import psutil
import pytest

from benchmarks.push import COLUMNS, MIB, Push, medians, peaks


def push(seconds: float, sent: int) -> dict[str, float]:
    return asdict(Push(seconds, 1.0, sent, MIB, 2 * MIB))


def test_medians_and_ratios() -> None:
    files = [push(1.0, 0), push(2.0, 0), push(3.0, 0)]
    network = [push(2.0, 400), push(2.0, 420), push(12.0, 410)]
    found = medians({"parameters": 100, "pushes": {"shared_memory": files, "network": network}})
    assert found["shared_memory"]["ratio"] == 1
    assert (found["network"]["seconds"], found["network"]["ratio"]) == (2.0, 2.0)
    assert found["network"]["bytes_per_parameter"] == pytest.approx(4.1)
    assert [show(found["network"]) for show in COLUMNS.values()] == ["2.000", "2.00", "1.00", "4.10", "1", "2"]


def test_the_largest_memory_is_seen() -> None:
    with peaks({"me": psutil.Process(os.getpid())}) as most:
        held = bytearray(os.urandom(64)) * (MIB // 2)
        while not most["me"]:
            pass
        largest = most["me"]
        del held
    assert most["me"] >= largest > 32 * MIB
