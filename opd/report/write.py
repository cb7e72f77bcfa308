"""Write report.html and report.json."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from opd.errors import RunDirError
from opd.files import atomic_write_text
from opd.report.gate import Gate
from opd.report.run import read_run
from opd.report.summary import full_report
from opd.run.paths import RunPaths
from opd.text import quote_for_shell


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
