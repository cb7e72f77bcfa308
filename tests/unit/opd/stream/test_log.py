"""The target log holds a step's streams bit by bit, whole or not at all."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from opd.interfaces import TargetSet
from opd.stream.heads import head_array, head_tensor
from opd.stream.log import ArrowTargetLog


def targets(*streams: bytes) -> TargetSet:
    return TargetSet(
        streams=tuple(np.frombuffer(s, dtype=np.uint8) for s in streams),
        heads={},
        head_rules={},
        quarantined={},
        rows=1,
    )


def test_streams_are_stored_as_they_are(tmp_path: Path, in_process: Any) -> None:
    path = ArrowTargetLog(tmp_path / "targets").write(12, targets(b"abc", b"", b"\0\xff"))
    assert path == tmp_path / "targets" / "step-000012"
    assert {p.name: p.read_bytes() for p in path.iterdir()} == {
        "part-0.arrow": b"abc",
        "part-1.arrow": b"",
        "part-2.arrow": b"\0\xff",
    }


def test_a_step_that_is_taken_again_replaces_the_first(tmp_path: Path, in_process: Any) -> None:
    log = ArrowTargetLog(tmp_path)
    log.write(1, targets(b"a", b"b"))
    (path,) = [log.write(1, targets(b"c"))]
    assert [p.read_bytes() for p in path.iterdir()] == [b"c"]
    assert [p.name for p in tmp_path.iterdir()] == ["step-000001"]


def test_a_failure_half_way_leaves_no_step(tmp_path: Path, in_process: Any) -> None:
    class Lost:
        @property
        def data(self) -> bytes:
            raise OSError("the store is gone")

    log = ArrowTargetLog(tmp_path)
    broken = TargetSet(streams=(np.zeros(3, np.uint8), Lost()), heads={}, head_rules={}, quarantined={}, rows=1)
    with pytest.raises(OSError, match="gone"):
        log.write(1, broken)
    assert list(tmp_path.glob("step-*")) == []
    log.write(1, targets(b"a"))
    assert [p.name for p in tmp_path.iterdir()] == ["step-000001"]


def test_prune_drops_what_a_checkpoint_holds(tmp_path: Path, in_process: Any) -> None:
    log = ArrowTargetLog(tmp_path)
    for step in (9, 10, 11):
        log.write(step, targets(b"a"))
    log.prune(10)
    assert [p.name for p in tmp_path.iterdir()] == ["step-000011"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_head_travels_bit_by_bit(dtype: torch.dtype) -> None:
    head = torch.randn(7, 3).to(dtype)
    back = head_tensor(head_array(head))
    assert back.dtype == dtype
    assert torch.equal(back, head)
