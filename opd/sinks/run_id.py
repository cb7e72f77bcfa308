"""The id under which a tracking service knows a run. It is kept in a file, so that a resume continues the same run there."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from opd.files import atomic_write_text


def load_or_create_id(file: Path, make: Callable[[], str]) -> str:
    """Return the id in the file. If there is no file, first write the id that `make` returns."""
    if not file.exists():
        file.parent.mkdir(parents=True, exist_ok=True)
        atomic_write_text(file, make())
    return file.read_text(encoding="utf-8")
