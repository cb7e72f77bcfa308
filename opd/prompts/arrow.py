"""Prompts as Arrow record batches: a few are kept in memory, many in a file that is made once and memory-mapped.

    $HF_DATASETS_CACHE/opd/KEY.arrow        the directory's default: ~/.cache/huggingface/datasets

KEY is a hash of all that decides the content, so a file is never out of date. A file is written under another name, flushed
and renamed, so it is whole or does not exist. Two processes that need it at the same time both write the same bytes, so no
lock is needed.
"""

from __future__ import annotations

import os
from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from opd.errors import StorageError
from opd.files import atomic_file, raise_storage_errors

IN_MEMORY_BYTES = 8 << 20
"""Sources up to this size are read anew each time, and no file is written for them."""
BATCH_BYTES = 4 << 20
"""A batch ends when its cells of bytes have this size."""
STALE_S = 24 * 3600
"""A temporary file of this age was left by a killed process."""


class Batches:
    """Record batches of one schema as one long table."""

    def __init__(self, batches: Iterable[pa.RecordBatch]) -> None:
        self._batches = list(batches)
        self._ends = list(accumulate(batch.num_rows for batch in self._batches))

    def __len__(self) -> int:
        return self._ends[-1] if self._batches else 0

    def read_cell(self, column: str, index: int) -> Any:
        """Return one cell as a Python value."""
        number = bisect_right(self._ends, index)
        batch = self._batches[number]
        return batch.column(column)[index - self._ends[number] + batch.num_rows].as_py()

    def read_cells(self, column: str, start: int, stop: int) -> list[Any]:
        """Return the cells from `start` to before `stop` as Python values."""
        values: list[Any] = []
        while start < min(stop, len(self)):
            number = bisect_right(self._ends, start)
            cells = self._batches[number].column(column)
            offset = start - self._ends[number] + len(cells)
            values += cells.slice(offset, stop - start).to_pylist()
            start += len(cells) - offset
        return values

    def flatten_lists(self, column: str) -> list[Any]:
        """Return the items of all lists of a column, one after the other."""
        return [value for batch in self._batches for value in batch.column(column).flatten().to_pylist()]

    def read_numbers(self, column: str) -> np.ndarray[Any, Any]:
        """Return a whole column of numbers, or of true and false."""
        parts = [batch.column(column).to_numpy(zero_copy_only=False) for batch in self._batches]
        return np.concatenate(parts) if parts else np.zeros(0, np.int64)


def cache_dir() -> Path:
    """Return the directory of the cached files. It is inside the cache of `datasets` and follows that library's variables."""
    home = os.environ.get("HF_HOME") or Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "huggingface"
    return Path(os.environ.get("HF_DATASETS_CACHE") or Path(home) / "datasets").expanduser() / "opd"


def open_batches(key: str, schema: pa.Schema, make: Callable[[], Iterable[pa.RecordBatch]], *, cached: bool) -> Batches:
    """Return the batches that `make` makes. With `cached` they are read from the file of this key, which is first written from
    `make` if it does not exist.

    Raises: StorageError if the file cannot be written. If `make` raises, no file is left.
    """
    if not cached:
        return Batches(make())
    path = cache_dir() / f"{key}.arrow"
    try:
        return _map_file(path)
    except FileNotFoundError:
        pass
    except pa.ArrowInvalid:  # the file is cut: the disk lost bytes that it had reported as written
        path.unlink(missing_ok=True)
    try:
        with raise_storage_errors(path):
            _write_batches(path, schema, make())
    except StorageError as error:
        raise StorageError(f"{error}; HF_DATASETS_CACHE moves this cache to another disk") from None
    return _map_file(path)


def in_batches(rows: Iterable[Sequence[Any]], schema: pa.Schema, sizes: int = 1024) -> Iterable[pa.RecordBatch]:
    """Yield rows, each with a cell for every field, as batches. A batch ends at `sizes` rows or at `BATCH_BYTES`."""
    columns: list[list[Any]] = [[] for _ in schema]
    nbytes = 0
    for row in rows:
        for column, cell in zip(columns, row, strict=True):
            column.append(cell)
        nbytes += sum(len(cell) for cell in row if isinstance(cell, bytes))
        if len(columns[0]) >= sizes or nbytes >= BATCH_BYTES:
            yield pa.record_batch([pa.array(c, f.type) for c, f in zip(columns, schema, strict=True)], schema=schema)
            columns, nbytes = [[] for _ in schema], 0
    if columns[0]:
        yield pa.record_batch([pa.array(c, f.type) for c, f in zip(columns, schema, strict=True)], schema=schema)


def _map_file(path: Path) -> Batches:
    """Map a file. The system reads a page when it is needed and may drop it again, so the pages do not count as our memory."""
    reader = pa.ipc.open_file(pa.memory_map(str(path)))
    return Batches(reader.get_batch(number) for number in range(reader.num_record_batches))


def _write_batches(path: Path, schema: pa.Schema, batches: Iterable[pa.RecordBatch]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_file(path) as file:
        _sweep_temporary_files(Path(file.name))
        with pa.ipc.new_file(file, schema) as writer:
            for batch in batches:
                writer.write_batch(batch)


def _sweep_temporary_files(new: Path) -> None:
    """Delete temporary files that killed processes left beside `new`.

    Their age is measured against the time of `new`, because a disk in the network may have another clock.
    """
    now = new.stat().st_mtime
    for path in new.parent.glob(".*.tmp"):
        try:
            if now - path.stat().st_mtime > STALE_S:
                path.unlink()
        except FileNotFoundError:
            continue  # another process has just finished and renamed it
