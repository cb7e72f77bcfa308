"""The report of a merge: report.json for other tools, report.html for people, and the gate on what it gained."""

from __future__ import annotations

from opd.report.run import RunFiles, read_run
from opd.report.summary import build_report, clear_domains, full_report, recovered_share
from opd.report.tables import (
    agent_rows,
    baseline_rows,
    domain_rows,
    draft_rows,
    effort_rows,
    length_rows,
    markdown_table,
    round_rows,
)
from opd.report.write import Gate, write_report

__all__ = [
    "Gate",
    "RunFiles",
    "agent_rows",
    "baseline_rows",
    "build_report",
    "clear_domains",
    "domain_rows",
    "draft_rows",
    "effort_rows",
    "full_report",
    "length_rows",
    "markdown_table",
    "read_run",
    "recovered_share",
    "round_rows",
    "write_report",
]
