"""Choose a device, move records of tensors to it, and return memory to the system."""

from __future__ import annotations

import ctypes
import dataclasses
import platform
from typing import TypeVar

import torch
from torch import Tensor

from opd.products import use_quick_products

T = TypeVar("T")


def computing_device(name: str | None = None) -> torch.device:
    """The device of torch's name for it, by default the GPU if there is one; a CPU then computes as quickly as it can."""
    device = torch.device(name or ("cuda" if torch.cuda.is_available() else "cpu"))
    use_quick_products(device)
    return device


def to_device(record: T, device: torch.device) -> T:
    """Move every tensor of a (possibly nested) record to `device`; tensors that are already there are not copied."""
    if isinstance(record, Tensor):
        return record.to(device)  # type: ignore[return-value]
    if isinstance(record, tuple):
        return tuple(to_device(part, device) for part in record)  # type: ignore[return-value]
    if dataclasses.is_dataclass(record):
        moved = {f.name: to_device(getattr(record, f.name), device) for f in dataclasses.fields(record)}
        return dataclasses.replace(record, **moved)  # type: ignore[type-var]
    return record


def trim_memory() -> None:
    """Return to the system the memory that this process has freed and malloc keeps; without glibc nothing happens."""
    if platform.libc_ver()[0] == "glibc":
        ctypes.CDLL(None).malloc_trim(0)
