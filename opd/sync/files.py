"""Streaming a model from its files to engines that cannot read them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from opd.cluster import list_nodes, put_object
from opd.models.buckets import Bucket, BucketWriter, WeightStream, count_padded_bytes
from opd.models.files import weight_files

if TYPE_CHECKING:
    from torch import Tensor


def stream_files(model_dir: Path, readable_dir: Path, nbytes: int) -> WeightStream:
    """Stream all weights of a Hugging Face directory in buckets of at most `nbytes` bytes.

    A larger tensor gets a bucket of its own. `readable_dir`: a model of the same shape that the engines can read. Taking buckets
    raises: OSError; WorkerDied if Ray is gone.
    """
    handles: Iterator[Any] = (put_object(bucket) for bucket in split_into_buckets(_iterate_tensors(model_dir), nbytes))
    # Absolute, because workers start in another directory.
    return WeightStream(model_dir=readable_dir.absolute(), whole=True, buckets=handles, node=list_nodes()[0].id)


def split_into_buckets(tensors: Iterable[tuple[str, Tensor]], nbytes: int) -> Iterator[Bucket]:
    """Put tensors into buckets in their order, as many into each as `nbytes` has room for."""
    pending: dict[str, Tensor] = {}
    for name, tensor in tensors:
        if pending and _total_bytes(pending) + count_padded_bytes(tensor) > nbytes:
            yield _write_bucket(pending)
            pending = {}
        pending[name] = tensor
    if pending:
        yield _write_bucket(pending)


def _write_bucket(tensors: dict[str, Tensor]) -> Bucket:
    writer = BucketWriter(_total_bytes(tensors))
    writer.add(tensors)
    return writer.finish_bucket()


def _total_bytes(tensors: dict[str, Tensor]) -> int:
    return sum(map(count_padded_bytes, tensors.values()))


def _iterate_tensors(model_dir: Path) -> Iterator[tuple[str, Tensor]]:
    from safetensors import safe_open

    for path in weight_files(model_dir):
        with safe_open(path, framework="pt", backend="pread") as file:
            for key in file.keys():  # noqa: SIM118 it is no mapping
                yield key, file.get_tensor(key)
