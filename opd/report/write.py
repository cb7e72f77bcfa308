"""Write report.html and report.json, and judge by thresholds what a merge gained, for scripts that decide whether to keep the model."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from opd.errors import ConfigError, RunDirError
from opd.files import atomic_write_text
from opd.report.run import read_run
from opd.report.summary import full_report
from opd.run.paths import RunPaths
from opd.text import quote_for_shell

SLACK = 1e-9
"""Tolerance for rounding: in floating point 0.98 - 0.96 is a little more than 0.02."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Gate:
    """Thresholds from 0 to 1; None means no threshold. They apply to the measured values, not to the ends of intervals."""

    min_headroom: float | None = None
    """Smallest share of the headroom that every domain must recover. A domain has no headroom if its expert is not better
    than the student beyond chance; then only `max_regression` judges it."""
    max_regression: float | None = None
    """Largest loss of accuracy of a domain against the student before the merge."""

    def __post_init__(self) -> None:
        for name, value in (("--min-headroom", self.min_headroom), ("--max-regression", self.max_regression)):
            if value is not None and not 0 <= value <= 1:  # refuses NaN too
                raise ConfigError.at(name, found=str(value), wanted="a share from 0 to 1", fix="0.9 means 90 %")

    @property
    def has_thresholds(self) -> bool:
        return self.min_headroom is not None or self.max_regression is not None

    def list_failures(self, report: Mapping[str, Any]) -> list[str]:
        """Return one sentence for each threshold that a domain misses. The report is that of a finished merge."""
        failures = []
        if self.min_headroom is not None and all(domain["headroom"] is None for domain in report["domains"].values()):
            failures.append("no domain has a headroom beyond chance: --min-headroom has nothing to judge")
        for name, domain in report["domains"].items():
            share, loss = domain["headroom"], domain["before"] - domain["after"]
            if self.min_headroom is not None and share is not None and share < self.min_headroom - SLACK:
                failures.append(
                    f"{name}: headroom {share:.3f} < {self.min_headroom:g} "
                    f"(before {domain['before']:.3f}, merged {domain['after']:.3f}, expert {domain['expert']:.3f})"
                )
            if self.max_regression is not None and loss > self.max_regression + SLACK:
                failures.append(
                    f"{name}: lost {loss:.3f} > {self.max_regression:g} "
                    f"(before {domain['before']:.3f}, merged {domain['after']:.3f})"
                )
        return failures

    def verdict(self, report: Mapping[str, Any]) -> dict[str, Any]:
        """Return the key `gate` of report.json."""
        failures = self.list_failures(report)
        unjudged = [name for name, domain in report["domains"].items() if domain["headroom"] is None]
        return {
            "min_headroom": self.min_headroom,
            "max_regression": self.max_regression,
            "passed": not failures,
            "failures": failures,
            "without_headroom": unjudged if self.min_headroom is not None else [],
        }


def write_report(root: Path, output: Path | None = None, gate: Gate | None = None) -> dict[str, Any]:
    """Write the page to `output` (default: report.html in the run directory) and report.json beside it. Returns the report.

    A merge that is not finished gets only a page, because report.json marks a merge as finished. Raises: RunDirError if a
    file is damaged, or if `gate` has thresholds and there is nothing to judge; OSError.
    """
    run = read_run(root)
    report = full_report(run)
    if gate and gate.has_thresholds:
        if not run.finished or not report["domains"]:
            raise RunDirError.at(
                root,
                found="a merge without a domain that was measured" if run.finished else "a merge that is not finished",
                wanted="a finished merge, for --min-headroom and --max-regression to judge",
                fix="give a domain an `eval`"
                if run.finished
                else f"finish it with `opd merge --resume {quote_for_shell(root)}`",
            )
        report["gate"] = gate.verdict(report)
    from opd.report.page import render_page  # here, because it imports matplotlib, and refusals should be fast

    page = output or RunPaths(root).report_page
    atomic_write_text(page, render_page(report, run))
    if run.finished:
        atomic_write_text(page.with_suffix(".json"), json.dumps(report, indent=2))
    return report
