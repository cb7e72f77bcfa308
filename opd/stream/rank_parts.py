"""Splitting a part of the target stream into one part for each trainer rank, so that a rank gets and decodes only its own rows."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Any

import numpy as np
import pyarrow as pa

from opd import cluster
from opd.stream.targets import StreamPart


def split_part(part: StreamPart, rank_of: Callable[[str], int]) -> dict[int, Any]:
    """Return rank -> handle to that rank's rows of the part. `rank_of`: sample id -> rank. A part of a single rank is not copied."""
    ranks = {rank_of(sample_id) for sample_id in part.samples}
    if len(ranks) <= 1:
        return dict.fromkeys(ranks, part.handle)
    return {
        rank: cluster.put_object(raw) for rank, raw in split_stream(cluster.fetch_object(part.handle), rank_of).items()
    }


def split_stream(raw: np.ndarray, rank_of: Callable[[str], int]) -> dict[int, np.ndarray]:
    """Return rank -> Arrow stream of its rows in their order, with the part's record; `raw` and the streams are uint8 [bytes]."""
    with pa.ipc.open_stream(pa.py_buffer(raw)) as reader:
        batch, metadata = reader.read_next_batch_with_custom_metadata()
    rows: dict[int, list[int]] = defaultdict(list)
    for number, sample_id in enumerate(batch.column("sample_id").to_pylist()):
        rows[rank_of(sample_id)].append(number)
    return {rank: _write_stream(batch.take(pa.array(numbers)), metadata) for rank, numbers in rows.items()}


def _write_stream(batch: pa.RecordBatch, metadata: pa.KeyValueMetadata) -> np.ndarray:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batch.schema) as writer:
        writer.write_batch(batch, custom_metadata=metadata)
    # An array, because workers read arrays from Ray's object store without a copy.
    return np.frombuffer(sink.getvalue(), dtype=np.uint8)
