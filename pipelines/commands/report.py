"""`opd report`, and the tables that `opd merge` also prints at its end."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from opd.errors import ConfigError
from opd.run.paths import RunPaths
from opd.text import quote_for_shell
from pipelines.commands.shell import RunArgument, check_output_file, help_examples, print_line, print_table

app = typer.Typer()

DOMAIN_COLUMNS = ("domain", "student before", "expert", "merged", "headroom recovered")
BASELINE_COLUMNS = ("method", "share", "response tokens", "seeds", "headroom recovered", "out of date")
AGENT_COLUMNS = ("domain", "episodes", "turns", "reward", "with loss", "forks", "turns lost", "broken", "gap of a turn")
EFFORT_COLUMNS = (
    "domain",
    "effort",
    "tokens before",
    "expert",
    "merged",
    "right before",
    "expert",
    "merged",
    "loss at ends",
)
DRAFT_COLUMNS = ("domain", "trainer: first steps", "last steps", "engines: first steps", "last steps")
LENGTH_COLUMNS = ("domain", "right moves", "tasks", "student before", "expert", "merged")
ROUND_COLUMNS = ("round", "steps", "mean gain", "headroom recovered", "of what was left")


@app.command(
    epilog=help_examples(
        "opd report runs/quickstart",
        "opd report runs/quickstart --markdown",
        "opd report runs/quickstart --min-headroom 0.5 --max-regression 0.02",
    )
)
def report(
    run_dir: RunArgument,
    markdown: Annotated[
        bool, typer.Option("--markdown", help="As a Markdown table, to paste into a document.")
    ] = False,
    output: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Where the page goes. Default: report.html in RUN_DIR.", callback=check_output_file
        ),
    ] = None,
    min_headroom: Annotated[
        float | None, typer.Option(help="Exit with 1 if a domain recovered less of its headroom (0 to 1).")
    ] = None,
    max_regression: Annotated[
        float | None, typer.Option(help="Exit with 1 if a domain lost more of the student's accuracy (0 to 1).")
    ] = None,
) -> None:
    """Print a merge's table and write it as a page, report.html, with report.json beside it."""
    from opd.report import Gate, write_report

    _refuse_json_page(output)
    gate = Gate(min_headroom=min_headroom, max_regression=max_regression)
    contents = write_report(run_dir, output, gate)
    if markdown:
        _print_markdown(contents)
    else:
        print_report(contents)
    print_line(f"page: {output or RunPaths(run_dir).report_page}")
    if gate.has_thresholds:
        for failure in contents["gate"]["failures"]:
            print_line(f"gate: {failure}")
        for name in contents["gate"]["without_headroom"]:
            print_line(
                f"gate: {name}: --min-headroom does not judge it: its expert was not better than the student beyond chance"
            )
        if not contents["gate"]["passed"]:
            raise typer.Exit(1)


def _refuse_json_page(output: Path | None) -> None:
    """Refuse a page FILE.json: the report's numbers are written beside the page under that name. Raises: ConfigError."""
    if output is not None and output.suffix == ".json":
        raise ConfigError.at(
            "opd report --output",
            found=f"{output}, where the report's numbers go, which are written beside the page by themselves",
            wanted="a name for the page",
            fix=f"--output {quote_for_shell(output.with_suffix('.html'))}",
        )


def print_report(contents: dict[str, Any]) -> None:
    """Print a merge's report as tables, and the remarks on it."""
    from opd.report import domain_rows, round_rows

    print_table(contents["name"], DOMAIN_COLUMNS, domain_rows(contents))
    if "rounds" in contents:
        print_table("rounds", ROUND_COLUMNS, round_rows(contents))
    for title, columns, rows in _further_tables(contents):
        print_table(title, columns, rows)
    _print_remarks(contents)


def _print_markdown(contents: dict[str, Any]) -> None:
    from opd.report import domain_rows, markdown_table

    print_line(markdown_table(DOMAIN_COLUMNS, domain_rows(contents)), err=False)
    for _, columns, rows in _further_tables(contents):
        print_line("\n" + markdown_table(columns, rows), err=False)
    _print_remarks(contents)


def _further_tables(contents: dict[str, Any]) -> list[tuple[str, tuple[str, ...], list[tuple[str, ...]]]]:
    """Return title, columns and rows of those of these tables that have rows."""
    from opd.report import agent_rows, baseline_rows, draft_rows, effort_rows, length_rows

    tables = [
        ("efforts", EFFORT_COLUMNS, effort_rows(contents)),
        ("draft: tokens of a pass", DRAFT_COLUMNS, draft_rows(contents)),
        ("agents", AGENT_COLUMNS, agent_rows(contents)),
        ("success by the length of the task (95 % interval)", LENGTH_COLUMNS, length_rows(contents)),
        ("beside other ways to merge", BASELINE_COLUMNS, baseline_rows(contents)),
    ]
    return [table for table in tables if table[2]]


def _print_remarks(contents: dict[str, Any]) -> None:
    """Print where the run comes from, whether it is unfinished, and which results are out of date."""
    for line in contents.get("lineage", ()):
        print_line(f"lineage: {line}")
    if "unfinished" in contents:
        print_line(f"not finished: {contents['unfinished']}")
    for line in contents.get("efforts", {}).get("falls", ()):
        print_line(f"efforts: {line}")
    for line in contents.get("stale", ()):
        print_line(f"out of date: {line}")
