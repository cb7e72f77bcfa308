"""What a name stands for: our dictionaries say `module:name`, so that whoever reads the names alone imports none of it."""

from __future__ import annotations

from importlib import import_module
from typing import Any


def imported(place: str) -> Any:
    """What `module:name` names."""
    module, _, name = place.partition(":")
    return getattr(import_module(module), name)
