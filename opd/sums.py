"""Records of sums, which are added field by field: over rows, micro-batches, ranks."""

from __future__ import annotations

from dataclasses import fields
from typing import Any, Self


class Sums:
    """Base of a dataclass whose every field can be added."""

    __slots__ = ()

    def __add__(self, other: Self) -> Self:
        record: Any = self
        return type(self)(**{f.name: getattr(self, f.name) + getattr(other, f.name) for f in fields(record)})
