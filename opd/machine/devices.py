"""Move records of tensors to a device, and give freed memory back to the system."""

from __future__ import annotations

import ctypes
import dataclasses
import platform
from typing import TypeVar

import torch
from torch import Tensor

T = TypeVar("T")


def to_device(record: T, device: torch.device) -> T:
    """Move every tensor of a (possibly nested) record to `device`; tensors that are already there are not copied."""
    if isinstance(record, Tensor):
        return record.to(device)  # type: ignore[return-value]
    if isinstance(record, dict):
        return {name: to_device(part, device) for name, part in record.items()}  # type: ignore[return-value]
    if isinstance(record, tuple):
        return tuple(to_device(part, device) for part in record)  # type: ignore[return-value]
    if dataclasses.is_dataclass(record):
        moved = {f.name: to_device(getattr(record, f.name), device) for f in dataclasses.fields(record)}
        return dataclasses.replace(record, **moved)  # type: ignore[type-var]
    return record


def trim_memory() -> None:
    """Give memory that this process has freed, but malloc still holds, back to the system. Without glibc it does nothing."""
    if platform.libc_ver()[0] == "glibc":
        ctypes.CDLL(None).malloc_trim(0)
