"""State of credit in a checkpoint, beside a model's shards: a few numbers as JSON, which keeps every bit of them."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

from blake3 import blake3

from opd.files import raise_storage_errors
from opd.records.types import WrittenFile

STATE = "credit.json"


def write_state(directory: Path, text: str) -> WrittenFile:
    """Write and sync the file, in a directory that is made if it is not there. Raises: StorageError."""
    began, raw, path = time.monotonic(), text.encode(), directory / STATE
    with raise_storage_errors(path):
        directory.mkdir(exist_ok=True)
        with path.open("wb") as file:
            file.write(raw)
            file.flush()
            os.fsync(file.fileno())
    return WrittenFile(name=STATE, blake3=blake3(raw).hexdigest(), size=len(raw), seconds=time.monotonic() - began)


def read_state(directory: Path) -> dict[str, Any]:
    """Read the file of `write_state`; its checkpoint was verified before."""
    state: dict[str, Any] = json.loads((directory / STATE).read_text(encoding="utf-8"))
    return state
