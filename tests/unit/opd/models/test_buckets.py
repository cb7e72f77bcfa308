"""Tensors arrive as they were sent, whatever their type and shape."""

from __future__ import annotations

import pickle
from math import inf

import numpy as np
import pytest
import torch

from opd.models.buckets import ALIGNMENT, Bucket, BucketWriter, KeptHandles, count_padded_bytes

TENSORS = {
    "a.weight": torch.arange(6.0).reshape(2, 3),
    "half": torch.tensor([1.5, -inf, 3e-3], dtype=torch.bfloat16),
    "turned": torch.arange(12.0, dtype=torch.float16).reshape(3, 4).T,
    "a part of another": torch.arange(10)[2:5],
    "one number": torch.tensor(7, dtype=torch.int8),
    "nothing": torch.empty(0, 4),
    "bias": torch.tensor([True, False]),
}


def filled(tensors: dict[str, torch.Tensor]) -> Bucket:
    writer = BucketWriter(sum(count_padded_bytes(tensor) for tensor in tensors.values()))
    for name, tensor in tensors.items():
        writer.add({name: tensor})
    return writer.finish_bucket()


def test_every_tensor_comes_back_bit_for_bit_and_in_order() -> None:
    sent = pickle.loads(pickle.dumps(filled(TENSORS)))
    found = dict(sent.tensors())
    assert list(found) == list(TENSORS)
    for name, tensor in TENSORS.items():
        assert found[name].dtype == tensor.dtype and torch.equal(found[name], tensor), name
    assert all(place.start % ALIGNMENT == 0 for place in sent.slots)


def test_what_travelled_is_not_written_to() -> None:
    """Ray hands out views into memory that other engines read as well."""
    sent = filled({"a": torch.zeros(3)})
    sent.data.flags.writeable = False
    ((_, first),) = sent.tensors()
    first += 1
    ((_, second),) = sent.tensors()
    assert second.tolist() == [0, 0, 0]


def test_whoever_keeps_a_tensor_does_not_keep_its_bucket() -> None:
    found = dict(filled(TENSORS).tensors())
    assert all(tensor.untyped_storage().nbytes() == tensor.nbytes for tensor in found.values())


def test_a_bucket_that_is_not_full_is_a_fault() -> None:
    writer = BucketWriter(3 * ALIGNMENT)
    writer.add({"a": torch.zeros(3), "b": torch.zeros(3)})
    with pytest.raises(AssertionError):
        writer.finish_bucket()


def test_values_are_copied_when_they_are_added() -> None:
    """A gathered weight is cut again right afterwards."""
    weight = torch.ones(2)
    writer = BucketWriter(count_padded_bytes(weight))
    writer.add({"a": weight})
    weight.zero_()
    ((_, found),) = writer.finish_bucket().tensors()
    assert found.tolist() == [1, 1]


def test_a_tensor_without_values_takes_as_much_as_one_with() -> None:
    assert (
        count_padded_bytes(torch.empty(17, dtype=torch.float32, device="meta"))
        == count_padded_bytes(torch.ones(17))
        == 2 * ALIGNMENT
    )
    assert count_padded_bytes(torch.empty(0)) == 0
    assert isinstance(filled({}).data, np.ndarray)


def test_kept_handles_come_again_without_being_made_again() -> None:
    made = []

    def source() -> object:
        for i in range(3):
            made.append(i)
            yield i

    kept = KeptHandles(source())  # type: ignore[arg-type]
    assert made == [], "made when they are taken"
    begun = iter(kept)
    assert (next(begun), made) == (0, [0])
    assert list(kept) == [0, 1, 2], "what was broken off goes on where it was"
    assert list(kept) == list(kept) == [0, 1, 2]
    assert made == [0, 1, 2]
