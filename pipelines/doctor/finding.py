"""A finding of `opd doctor`: the check, its result and the remedy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Level = Literal["ok", "warning", "failed"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One line of `opd doctor`."""

    name: str
    """Name of the check."""
    level: Level
    """`failed`: some merge will not run; `warning`: it will run worse, or some part will not."""
    found: str
    fix: str = ""
    """The remedy; empty if all is well."""


def ok(name: str, found: str) -> Finding:
    return Finding(name=name, level="ok", found=found)


def warning(name: str, found: str, fix: str) -> Finding:
    return Finding(name=name, level="warning", found=found, fix=fix)


def failed(name: str, found: str, fix: str) -> Finding:
    return Finding(name=name, level="failed", found=found, fix=fix)
