"""Files that survive a crash: written beside their place, synced, renamed, and the directory synced too."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from blake3 import blake3


def fsync_dir(path: Path) -> None:
    """Make the names in a directory durable. Raises: OSError."""
    _fsync(path, os.O_RDONLY | os.O_DIRECTORY)


def atomic_write_text(path: Path, text: str) -> None:
    """Write UTF-8 so that `path` holds either its old content or all of the new one. Raises: OSError."""
    tmp = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with tmp.open("w", encoding="utf-8", newline="\n") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        tmp.replace(path)
    finally:
        tmp.unlink(missing_ok=True)
    fsync_dir(path.parent)


def replace_dir(tmp: Path, final: Path) -> None:
    """Sync every file under `tmp` and rename it to `final`, which lies on the same file system.

    A directory already at `final` is moved aside first and deleted last: a crash in between loses neither of the two,
    and `final` is never a mixture. Raises: OSError.
    """
    for directory, _, names in os.walk(tmp):
        for name in names:
            _fsync(Path(directory, name), os.O_RDONLY)
        fsync_dir(Path(directory))
    aside = final.with_name(f".{final.name}.{os.getpid()}.old")
    if final.exists():
        final.rename(aside)
    tmp.rename(final)
    fsync_dir(final.parent)
    if aside.exists():
        shutil.rmtree(aside)


def blake3_file(path: Path) -> str:
    """Hash of a file's bytes as 64 hexadecimal digits, read through a memory map. Raises: OSError."""
    return blake3(max_threads=blake3.AUTO).update_mmap(path).hexdigest()


def _fsync(path: Path, flags: int) -> None:
    descriptor = os.open(path, flags)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
