"""A merge that was killed while DeepSpeed's helper was compiled does not keep the next one from starting."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from torch.utils.file_baton import FileBaton

from opd.train.builds import clear_dead_locks

HOLD = "import sys, time; from torch.utils.file_baton import FileBaton; print(FileBaton(sys.argv[1]).try_acquire(), flush=True); time.sleep(60)"


def test_a_lock_goes_with_its_owner(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    lock = tmp_path / "py311_cpu" / "deepspeed_shm_comm" / "lock"
    lock.parent.mkdir(parents=True)
    owner = subprocess.Popen([sys.executable, "-c", HOLD, str(lock)], stdout=subprocess.PIPE, text=True)
    try:
        assert owner.stdout is not None and owner.stdout.readline() == "True\n"
        os.utime(lock, (0, 0))
        assert clear_dead_locks() == [] and lock.exists(), "its owner lives"
    finally:
        owner.kill()
        owner.wait()
    assert not FileBaton(str(lock)).try_acquire(), "torch does not notice"
    os.utime(lock)
    assert clear_dead_locks() == [], "too young to say"
    os.utime(lock, (0, 0))
    assert clear_dead_locks() == [lock]
    assert FileBaton(str(lock)).try_acquire()
    assert clear_dead_locks(young_s=-1.0) == [], "held by this process"
