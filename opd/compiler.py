"""The C++ compiler that torch.compile needs."""

from __future__ import annotations

import functools
import shutil
import warnings


def compiler() -> str | None:
    """Its path; None if there is none."""
    return shutil.which("c++") or shutil.which("g++")


@functools.cache
def can_compile(key: str, what: str) -> bool:
    """Whether there is one. Without it a setting `key` has no effect: one warning says that `what` eagerly."""
    found = compiler() is not None
    if not found:
        warnings.warn(f"{key}: no C++ compiler (g++), {what} eagerly", stacklevel=2)
    return found
