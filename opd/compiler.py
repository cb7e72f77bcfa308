"""The C++ compiler that torch.compile needs."""

from __future__ import annotations

import functools
import shutil
import warnings


@functools.cache
def can_compile(key: str, what: str) -> bool:
    """Whether there is one. Without it a setting `key` has no effect: one warning says that `what` eagerly."""
    found = bool(shutil.which("c++") or shutil.which("g++"))
    if not found:
        warnings.warn(f"{key}: no C++ compiler (g++), {what} eagerly", stacklevel=2)
    return found
