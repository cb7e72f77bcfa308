"""The target log holds a step's parts bit by bit, whole or not at all."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from opd.stream.heads import head_array, head_tensor
from opd.stream.log import ArrowTargetLog
from opd.stream.schema import PartRecord


class Parts:
    """Stands for a `TargetStream`: shows parts to whoever wants to see them."""

    def __init__(self, *parts: tuple[int, int, bytes]) -> None:
        self.parts = parts
        self.sinks: list[Any] = []

    def tee(self, sink: Any) -> None:
        self.sinks.append(sink)

    def pass_by(self, num: int | None = None) -> None:
        """The first `num` parts, or all and the end."""
        for worker, number, raw in self.parts[:num]:
            for sink in self.sinks:
                sink(PartRecord(worker=worker, number=number), np.frombuffer(raw, dtype=np.uint8))
        for sink in self.sinks if num is None else []:
            sink(None, None)


def record(log: ArrowTargetLog, step: int, *parts: tuple[int, int, bytes]) -> None:
    targets: Any = Parts(*parts)
    log.record(step, targets)
    targets.pass_by()


def test_parts_are_stored_as_they_are(tmp_path: Path) -> None:
    record(ArrowTargetLog(tmp_path / "targets"), 12, (0, 0, b"abc"), (1, 0, b""), (0, 1, b"\0\xff"))
    (path,) = (tmp_path / "targets").iterdir()
    assert path.name == "step-000012"
    assert {p.name: p.read_bytes() for p in path.iterdir()} == {
        "worker-0-part-0000.arrow": b"abc",
        "worker-0-part-0001.arrow": b"\0\xff",
        "worker-1-part-0000.arrow": b"",
    }


def test_a_step_that_is_taken_again_replaces_the_first(tmp_path: Path) -> None:
    log = ArrowTargetLog(tmp_path)
    record(log, 1, (0, 0, b"a"), (0, 1, b"b"))
    record(log, 1, (0, 0, b"c"))
    (path,) = tmp_path.iterdir()
    assert path.name == "step-000001"
    assert [p.read_bytes() for p in path.iterdir()] == [b"c"]


def test_a_step_that_did_not_end_is_not_in_the_log(tmp_path: Path) -> None:
    log = ArrowTargetLog(tmp_path)
    targets: Any = Parts((0, 0, b"a"), (0, 1, b"b"))
    log.record(1, targets)
    targets.pass_by(1)
    assert list(tmp_path.glob("step-*")) == []
    record(log, 1, (0, 0, b"c"))
    (path,) = tmp_path.iterdir()
    assert [p.read_bytes() for p in path.iterdir()] == [b"c"]


def test_prune_drops_what_a_checkpoint_holds(tmp_path: Path) -> None:
    log = ArrowTargetLog(tmp_path)
    for step in (9, 10, 11):
        record(log, step, (0, 0, b"a"))
    log.prune(10)
    assert [p.name for p in tmp_path.iterdir()] == ["step-000011"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_head_travels_bit_by_bit(dtype: torch.dtype) -> None:
    head = torch.randn(7, 3).to(dtype)
    back = head_tensor(head_array(head))
    assert back.dtype == dtype
    assert torch.equal(back, head)
