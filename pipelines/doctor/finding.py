"""The finding of one check of `opd doctor`: the check's name, its result, and how to fix it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Level = Literal["ok", "warning", "failed"]


@dataclass(frozen=True, slots=True, kw_only=True)
class DoctorFinding:
    """One line of `opd doctor`."""

    name: str
    """Name of the check."""
    level: Level
    """`failed_finding`: some merge will not run; `warning_finding`: it will run worse, or some part will not."""
    found: str
    fix: str = ""
    """The remedy; empty if all is well."""


def ok_finding(name: str, found: str) -> DoctorFinding:
    return DoctorFinding(name=name, level="ok", found=found)


def warning_finding(name: str, found: str, fix: str) -> DoctorFinding:
    return DoctorFinding(name=name, level="warning", found=found, fix=fix)


def failed_finding(name: str, found: str, fix: str) -> DoctorFinding:
    return DoctorFinding(name=name, level="failed", found=found, fix=fix)
