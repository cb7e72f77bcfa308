"""What was looked at, what was found, and what to do about it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Level = Literal["ok", "warning", "failed"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One line of `opd doctor`."""

    name: str
    """What was looked at."""
    level: Level
    """`failed`: some merge will not run; `warning`: it will run worse, or some part will not."""
    found: str
    fix: str = ""
    """What to do; empty if all is well."""


def ok(name: str, found: str) -> Finding:
    return Finding(name=name, level="ok", found=found)


def warning(name: str, found: str, fix: str) -> Finding:
    return Finding(name=name, level="warning", found=found, fix=fix)


def failed(name: str, found: str, fix: str) -> Finding:
    return Finding(name=name, level="failed", found=found, fix=fix)
