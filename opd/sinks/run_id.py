"""The name under which a tracking service knows a run, kept so that a resume goes on with the same one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from opd.files import atomic_write_text


def load_or_create_id(file: Path, make: Callable[[], str]) -> str:
    """Read the name from the file. Without a file, take the name from `make` and write it there."""
    if not file.exists():
        file.parent.mkdir(parents=True, exist_ok=True)
        atomic_write_text(file, make())
    return file.read_text(encoding="utf-8")
