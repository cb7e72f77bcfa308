"""Locks that were left in torch's cache of compiled extensions.

DeepSpeed compiles a helper on its first use. Whoever compiles or loads it holds a lock, a plain file that the others wait
for without end. A merge that is killed at that moment leaves the file, and from then on no trainer of that user starts.
"""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path

import psutil

YOUNG_S = 60.0
"""Locks of less than this are left alone: their owner may run in another container, where it cannot be seen."""


def clear_dead_locks(young_s: float = YOUNG_S) -> list[Path]:
    """Remove the locks of DeepSpeed's extensions that no process holds open; returns them."""
    dead = []
    for lock in _root().glob("**/deepspeed_*/lock"):
        with contextlib.suppress(FileNotFoundError):  # released, or cleared by another rank
            if time.time() - lock.stat().st_mtime > young_s and not _held(lock):
                lock.unlink()
                dead.append(lock)
    return dead


def _root() -> Path:
    """Where torch keeps compiled extensions."""
    if given := os.environ.get("TORCH_EXTENSIONS_DIR"):
        return Path(given)
    # Here and not above: it imports setuptools, which fails in a process that looked for pip first (Python 3.11).
    from torch.utils.cpp_extension import get_default_build_root

    return Path(get_default_build_root())


def _held(lock: Path) -> bool:
    """Whether a process has the file open; who takes the lock keeps it open until it gives it back."""
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if any(Path(file.path) == lock for file in process.open_files()):
                return True
    return False
