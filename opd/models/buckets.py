"""New weights on their way to engines that share no files with the trainer: named tensors, several in one array of bytes."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from torch import Tensor

BUCKET_BYTES = 64 << 20
"""Most bytes of a bucket, unless a single tensor is larger."""
ALIGNMENT = 64
"""In a bucket every tensor begins at a multiple of this many bytes, so that it is aligned whatever its type is."""


@dataclass(frozen=True, slots=True)
class BucketSlot:
    """Position and type of a tensor in a bucket."""

    name: str
    """Name of the tensor in the model's files."""
    dtype: str
    """torch's name of the type, such as `bfloat16`."""
    shape: tuple[int, ...]
    start: int
    """Index of the tensor's first byte in `Bucket.data`."""

    @property
    def end(self) -> int:
        """Index of the byte behind the tensor and its padding."""
        return self.start + _pad(math.prod(self.shape) * self._type.itemsize)

    def view(self, data: Tensor) -> Tensor:
        """Return the tensor as a view of the bucket's bytes `data`, uint8 [bytes] on any device."""
        nbytes = math.prod(self.shape) * self._type.itemsize
        return data[self.start : self.start + nbytes].view(self._type).view(self.shape)

    @property
    def _type(self) -> Any:
        import torch

        return getattr(torch, self.dtype)


@dataclass(frozen=True, slots=True)
class Bucket:
    """Some tensors of a model with their values."""

    slots: tuple[BucketSlot, ...]
    data: np.ndarray
    """uint8 [bytes] the values of all tensors, each at its slot's `start`."""

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield name and value of each tensor, in order.

        Each is a copy: the bucket's bytes are read-only, and whoever kept a view would keep the whole bucket in memory.
        """
        import torch

        for slot in self.slots:
            tensor = torch.empty(slot.shape, dtype=getattr(torch, slot.dtype))
            if tensor.numel():
                # As bytes, because numpy has no bfloat16.
                tensor.view(-1).view(torch.uint8).numpy()[:] = self.data[slot.start : slot.start + tensor.nbytes]
            yield slot.name, tensor


@dataclass(slots=True)
class BucketWriter:
    """Fills a bucket of `nbytes` bytes."""

    nbytes: int
    _slots: list[BucketSlot] = field(default_factory=list)
    _end: int = 0
    _data: np.ndarray = field(init=False)

    def __post_init__(self) -> None:
        self._data = np.empty(self.nbytes, np.uint8)

    def add(self, tensors: Mapping[str, Tensor]) -> None:
        """Copy the values of these tensors into the bucket, behind those that are there."""
        import torch

        data = torch.from_numpy(self._data)
        for slot in make_slots(tensors, self._end):
            slot.view(data).copy_(tensors[slot.name])
            self._slots.append(slot)
            self._end = slot.end

    def finish_bucket(self) -> Bucket:
        """Return the bucket; all of its bytes must be filled."""
        assert self._end == self.nbytes, (self._end, self.nbytes)
        return Bucket(tuple(self._slots), self._data)


def make_slots(tensors: Mapping[str, Tensor], start: int = 0) -> tuple[BucketSlot, ...]:
    """Return the slots of tensors that follow each other in a bucket from byte `start` on. They may be on the meta device."""
    slots: list[BucketSlot] = []
    for name, tensor in tensors.items():
        dtype = str(tensor.dtype).removeprefix("torch.")
        slots.append(BucketSlot(name, dtype, tuple(tensor.shape), start))
        start = slots[-1].end
    return tuple(slots)


def count_padded_bytes(tensor: Tensor) -> int:
    """Return the bytes that a tensor takes in a bucket, with its padding. The tensor may be on the meta device."""
    return _pad(tensor.numel() * tensor.dtype.itemsize)


def _pad(nbytes: int) -> int:
    """Round bytes up to the next multiple of `ALIGNMENT`."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightStream:
    """New weights in buckets, each of which is made when its handle is taken from `buckets`."""

    model_dir: Path
    """Directory of a model of the same shape; it has the weights that are not in the stream."""
    whole: bool
    """True if all weights are in the stream."""
    buckets: Iterable[Any]
    """Handles of Ray's object store: given to a worker's method, each arrives as a `Bucket`."""
    node: str | None = None
    """Ray's id of the node whose object store gets the buckets as they are made; None if it is not known."""


class KeptHandles:
    """Handles that can be iterated again and again: each is taken from `source` once, and kept."""

    def __init__(self, source: Iterable[Any]) -> None:
        self._source = iter(source)
        self._handles: list[Any] = []

    def __iter__(self) -> Iterator[Any]:
        yield from list(self._handles)
        for handle in self._source:
            self._handles.append(handle)
            yield handle
