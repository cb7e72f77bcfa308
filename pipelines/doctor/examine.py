"""All checks of `opd doctor`, in the order in which they are shown."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

from opd import __version__
from pipelines.doctor.finding import DoctorFinding
from pipelines.doctor.machine import machine_findings
from pipelines.doctor.packages import package_findings
from pipelines.doctor.traps import trap_findings


def examine_machine(imports: bool) -> Iterator[DoctorFinding]:
    """Yield the findings of all checks. With `imports` the engines' packages are imported too, which takes seconds."""
    yield from machine_findings()
    yield from trap_findings()
    yield from package_findings(imports)


def is_failed(findings: Sequence[DoctorFinding]) -> bool:
    """Return True if a merge cannot run here."""
    return any(finding.level == "failed" for finding in findings)


def findings_to_json(findings: Sequence[DoctorFinding]) -> dict[str, Any]:
    """Return the findings as one JSON object."""
    return {"opd": __version__, "ok": not is_failed(findings), "checks": [asdict(finding) for finding in findings]}
