"""Records whose fields are sums, added field by field over rows, micro-batches and ranks; and means of numbers that may be unknown."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import fields
from statistics import fmean
from typing import Any, Self, TypeVar


class Sums:
    """Base of a dataclass whose every field can be added."""

    __slots__ = ()

    def __add__(self, other: Self) -> Self:
        record: Any = self
        return type(self)(**{f.name: getattr(self, f.name) + getattr(other, f.name) for f in fields(record)})


K = TypeVar("K")
S = TypeVar("S", bound=Sums)


def add_to_sums(sums: dict[K, S], key: K, record: S) -> None:
    """Add a record to the one that `sums` has under the same key, in place; if it has none, keep the record."""
    sums[key] = sums[key] + record if key in sums else record


def sum_by_key(parts: Iterable[Mapping[K, S]]) -> dict[K, S]:
    """Return key -> sum of the records that the parts have under it. Keys are in the order in which they first come."""
    sums: dict[K, S] = {}
    for part in parts:
        for key, record in part.items():
            add_to_sums(sums, key, record)
    return sums


def mean_or_none(values: Iterable[float | None]) -> float | None:
    """Return the mean of the numbers that are not None; None if there are none."""
    numbers = [value for value in values if value is not None]
    return fmean(numbers) if numbers else None
