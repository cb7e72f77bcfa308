"""Gathering in place, with one rank and with two real ones."""

from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from torch._utils import _flatten_dense_tensors

from opd.train.exchange import gather_in_place, patch_flatten, patch_post_step
from tests.unit.sources import ROOT


def test_a_single_rank_copies_and_asks_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.distributed, "get_rank", lambda group: 0)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda group: 1)
    monkeypatch.delattr(torch.distributed, "broadcast")
    whole, part = torch.zeros(2, 3), torch.arange(6.0)
    work = gather_in_place(whole, part, async_op=True)
    assert work is not None
    work.wait()
    assert torch.equal(whole, part.view(2, 3))
    assert gather_in_place(whole, -part) is None
    assert torch.equal(whole, -part.view(2, 3))


def test_gradients_side_by_side_are_one_tensor_without_a_copy() -> None:
    optimizer = SimpleNamespace(flatten=_flatten_dense_tensors)  # DeepSpeed's
    patch_flatten(optimizer)
    memory = torch.arange(12.0)
    a, b, c = memory[2:5], memory[5:9].view(2, 2), memory[9:]
    whole = optimizer.flatten([a, b, c])
    assert torch.equal(whole, memory[2:])
    assert whole.data_ptr() == a.data_ptr()
    # Whatever lies otherwise is copied: a gap, another order, other memory, a transposed tensor.
    for parts in ([a, c], [b, a], [a, b.clone()], [a, b.T]):
        copied = optimizer.flatten(parts)
        assert torch.equal(copied, torch.cat([part.reshape(-1) for part in parts]))
        assert copied.data_ptr() != parts[0].data_ptr()


def test_small_weights_are_gathered_in_one_exchange_after_a_step() -> None:
    """Two ranks against one (tests/integration/test_engines.py) show that the weights are right."""
    from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus as Status

    told: list[object] = []

    def weight(name: str, status: Status, copied: bool = False) -> SimpleNamespace:
        made = SimpleNamespace(name=name, ds_status=status, ds_secondary_tensor="copy" if copied else None)

        def gather(together: list[SimpleNamespace]) -> SimpleNamespace:
            told.append([each.name for each in together])
            return SimpleNamespace(wait=lambda: [setattr(each, "ds_status", Status.AVAILABLE) for each in together])

        made.all_gather_coalesced = gather
        return made

    weights = [
        weight("a", Status.NOT_AVAILABLE),
        weight("b", Status.AVAILABLE),
        weight("frozen", Status.NOT_AVAILABLE, copied=True),
        weight("c", Status.NOT_AVAILABLE),
    ]
    optimizer = SimpleNamespace(persistent_parameters=weights)
    optimizer.invalidate_secondary_tensor = lambda: told.append(["old copies dropped"])
    optimizer._post_step = lambda timers: told.append([timers, *(each.ds_status for each in weights)])
    patch_post_step(optimizer)
    optimizer._post_step("timers")
    optimizer._post_step("timers")
    whole = ["timers", *[Status.AVAILABLE] * 4]
    dropped = ["old copies dropped"]
    assert told == [dropped, ["a", "c"], ["frozen"], whole, dropped, whole]


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_ranks_gather_what_all_have_and_hold_it_once() -> None:
    """torch's own gather holds it twice; both are asked, so that this says when torch no longer does."""
    told = subprocess.run(
        [sys.executable, "-c", GATHERING], capture_output=True, text=True, timeout=120, cwd=ROOT, check=False
    )
    assert told.returncode == 0, told.stderr
    for line in told.stdout.splitlines():
        in_place, theirs = map(float, line.split())
        assert in_place < 0.2 < 0.8 < theirs, told.stdout


GATHERING = """
import os
from datetime import timedelta
from pathlib import Path

import torch

from opd.train.exchange import gather_in_place
from opd.machine.network import open_listener
from opd.train.process_group import join_ranks

def most(what):
    return next(int(line.split()[1]) << 10 for line in Path("/proc/self/status").read_text().splitlines() if what in line)

def beside(gather):
    "What gathering needs beside parts and result, in results."
    whole_N = torch.ones(16 << 20)
    part_N = torch.full((whole_N.numel() // 2,), rank + 1.0)
    torch.distributed.barrier()
    Path("/proc/self/clear_refs").write_text("5")
    before = most("VmRSS")
    work = gather(whole_N, part_N, async_op=True)
    work.wait()
    needed = most("VmHWM") - before
    assert [half.unique().tolist() for half in whole_N.chunk(2)] == [[1.0], [2.0]]
    return needed / whole_N.nbytes

door = open_listener("127.0.0.1")
port, rank = door.getsockname()[1], int(os.fork() == 0)
if rank:
    door.close()
join_ranks("127.0.0.1", port, rank, 2, timedelta(seconds=60), None if rank else door)
beside(gather_in_place)  # connects
found = beside(gather_in_place), beside(torch.distributed.all_gather_into_tensor)
os.write(1, "{:.2f} {:.2f}\\n".format(*found).encode())  # at once: both write to one pipe
torch.distributed.barrier()
if not rank:  # the store that the other one speaks to is here
    assert os.wait()[1] == 0
torch.distributed.destroy_process_group()
"""
