"""The state of credit in a checkpoint: a few numbers as JSON, which keeps every bit of them. A critic's shards lie beside it."""

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
    """Write `text` to the state file and sync it; makes the directory if it is not there. Raises: StorageError."""
    began, raw, path = time.monotonic(), text.encode(), directory / STATE
    with raise_storage_errors(path):
        directory.mkdir(exist_ok=True)
        with path.open("wb") as file:
            file.write(raw)
            file.flush()
            os.fsync(file.fileno())
    return WrittenFile(name=STATE, blake3=blake3(raw).hexdigest(), size=len(raw), seconds=time.monotonic() - began)


def read_state(directory: Path) -> dict[str, Any]:
    """Read what `write_state` wrote. The caller has verified the checkpoint, so nothing is checked here."""
    state: dict[str, Any] = json.loads((directory / STATE).read_text(encoding="utf-8"))
    return state
