"""Files of the target log that hold the parts of a step. A scoring worker that reaches the run directory writes its parts itself, and the
driver those of all others."""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from blake3 import blake3

from opd import cluster
from opd.files import atomic_file
from opd.stream.schema import PartRecord

TOKEN = ".token"
"""Name of the file by which a worker knows that a path leads it to the driver's own directory, and not to one of the same name on
another machine."""


@dataclass(frozen=True, slots=True)
class PartsDirectory:
    """The directory of a step that is not in the log yet, as scoring workers get to know it."""

    path: Path
    token: str

    @classmethod
    def create(cls, path: Path) -> PartsDirectory:
        """Make the directory, which must not exist, with a new token. Raises: OSError."""
        path.mkdir(parents=True)
        directory = cls(path.absolute(), secrets.token_hex(16))
        (path / TOKEN).write_text(directory.token, encoding="ascii")
        return directory

    def is_here(self) -> bool:
        """Return True if the path leads this process to the directory that `create` made."""
        try:
            return (self.path / TOKEN).read_text(encoding="ascii") == self.token
        except (OSError, UnicodeDecodeError):
            return False

    def write_part(self, record: PartRecord, raw: memoryview) -> str:
        """Write a part, and sync it. Returns the file's BLAKE3; empty, with no file left, if this process cannot write there.

        The token is read each time: a worker may outlive its driver for a moment, and a resume makes the directory anew.
        """
        if not self.is_here():
            return ""
        try:
            with atomic_file(self.path / part_name(record)) as file:
                file.write(raw)
        except OSError:
            return ""  # the driver tries it too, and its error says whether the disk is full
        return blake3(raw).hexdigest()


def part_name(record: PartRecord) -> str:
    """Return the name of a part's file."""
    return f"worker-{record.worker}-part-{record.number:04d}.arrow"


def read_part(handle: object) -> np.ndarray:
    """Return the bytes of a part, uint8, without a copy: from its file if `handle` is a path, else from Ray's object store.

    Raises: WorkerDied if Ray is gone; OSError.
    """
    if isinstance(handle, Path):
        return np.memmap(handle, dtype=np.uint8, mode="r")
    raw: np.ndarray = handle if isinstance(handle, np.ndarray) else cluster.fetch_object(handle)
    return raw
