"""Remove locks that a killed run left in torch's cache of compiled extensions.

DeepSpeed compiles a helper on its first use. The process that compiles or loads it holds a lock, a plain file for which the
others wait without end. A merge that is killed at that moment leaves the file; then no trainer of that user starts any more.
"""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path

import psutil

YOUNG_S = 60.0
"""Younger locks are left alone: their owner may run in another container, where we cannot see it."""


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
    """The directory in which torch keeps compiled extensions."""
    if given := os.environ.get("TORCH_EXTENSIONS_DIR"):
        return Path(given)
    # Not at the top: this imports setuptools, which on Python 3.11 fails in a process that has looked for pip before.
    from torch.utils.cpp_extension import get_default_build_root

    return Path(get_default_build_root())


def _held(lock: Path) -> bool:
    """True if a process has the file open: the owner of a lock keeps it open until the end."""
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if any(Path(file.path) == lock for file in process.open_files()):
                return True
    return False
