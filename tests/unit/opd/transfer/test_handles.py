"""A buffer that another process opens is the same memory. A GPU's handles take the same way through torch."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import torch

from opd.transfer.handles import find_memory_id
from tests.unit.sources import ROOT

SHARING = """
import multiprocessing, torch
from opd.transfer.handles import export_buffer, open_buffer

torch.multiprocessing.set_sharing_strategy("file_system")  # as a handle that needs no open socket, like a GPU's

def read(handle, pipe):
    opened = open_buffer(handle, torch.device("cpu"))
    pipe.send(opened.tolist())
    pipe.recv()
    pipe.send(opened.tolist())

if __name__ == "__main__":
    buffer = torch.arange(5, dtype=torch.uint8)
    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(target=read, args=(export_buffer(buffer), theirs))
    process.start()
    before = ours.recv()
    buffer.fill_(9)
    ours.send("filled again")
    print(before, ours.recv())
    process.join()
"""


def test_another_process_sees_what_is_filled_into_the_buffer(tmp_path: Path) -> None:
    path = tmp_path / "sharing.py"
    path.write_text(SHARING)
    done = subprocess.run(
        [sys.executable, path],
        capture_output=True, text=True, timeout=120, cwd=ROOT, check=False, env={"PYTHONPATH": str(ROOT), "PATH": ""},
    )  # fmt: skip
    assert done.stdout.strip() == "[0, 1, 2, 3, 4] [9, 9, 9, 9, 9]", done.stderr


def test_a_cpus_memory_has_no_id() -> None:
    assert find_memory_id(torch.device("cpu")) == ""
