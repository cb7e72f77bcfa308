"""The benchmark of pushes without trainer and engine: its figures are medians, and ratios are taken within a round."""

from __future__ import annotations

import os
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from benchmarks.push import COLUMNS, MIB, Bench, Push, medians, peaks


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


class Sync:
    """Both ends: far apart until something is brought."""

    def __init__(self, brings: bool) -> None:
        self.brings, self.gap = brings, 0.0

    def send_weights(self, version: int) -> None:
        if self.brings:
            self.gap = 1e-6

    def measure_gap(self) -> float:
        return self.gap

    def load(self, model_dir: Path) -> None:
        self.gap = 0.2


@pytest.mark.parametrize("brings", [True, False])
def test_a_way_that_brings_nothing_ends_the_benchmark(brings: bool) -> None:
    sync, bench = Sync(brings), object.__new__(Bench)
    workers = {name: SimpleNamespace(pulse=SimpleNamespace(pid=os.getpid())) for name in ("rank", "engine")}
    vars(bench).update(_engine=sync, _other=Path("other"), _syncs={"network": sync}, _workers=workers)
    if brings:
        assert bench.push("network", 1).seconds > 0
        return
    with pytest.raises(SystemExit, match=r"network: engine and trainer differ by 0\.2 nats a token"):
        bench.push("network", 1)
