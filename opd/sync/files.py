"""A model's files as a stream of weights, for engines that do not share them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from opd.cluster import nodes, put
from opd.models.buckets import Bucket, BucketWriter, WeightStream, padded
from opd.models.files import weight_files

if TYPE_CHECKING:
    from torch import Tensor


def stream_files(model_dir: Path, like: Path, nbytes: int) -> WeightStream:
    """All weights of a directory whose files have Hugging Face's names, in buckets of at most `nbytes` unless a tensor is larger. `like` is a
    model of this shape that the engines can read. Taking buckets raises: OSError; WorkerDied if Ray is gone."""
    handles: Iterator[Any] = (put(bucket) for bucket in buckets(_tensors(model_dir), nbytes))
    return WeightStream(model_dir=like.absolute(), whole=True, buckets=handles, node=nodes()[0].id)


def buckets(tensors: Iterable[tuple[str, Tensor]], nbytes: int) -> Iterator[Bucket]:
    """Tensors in order, by name, as many to a bucket as it has room for."""
    held: dict[str, Tensor] = {}
    for name, tensor in tensors:
        if held and _size(held) + padded(tensor) > nbytes:
            yield _bucket(held)
            held = {}
        held[name] = tensor
    if held:
        yield _bucket(held)


def _bucket(tensors: dict[str, Tensor]) -> Bucket:
    writer = BucketWriter(_size(tensors))
    writer.add(tensors)
    return writer.bucket()


def _size(tensors: dict[str, Tensor]) -> int:
    return sum(map(padded, tensors.values()))


def _tensors(model_dir: Path) -> Iterator[tuple[str, Tensor]]:
    from safetensors import safe_open

    for path in weight_files(model_dir):
        with safe_open(path, framework="pt", backend="pread") as file:
            for key in file.keys():  # noqa: SIM118 it is no mapping
                yield key, file.get_tensor(key)
