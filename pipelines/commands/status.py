"""`opd status` and `opd runs`."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from pipelines.commands import completion
from pipelines.commands.shell import help_examples, is_terminal, print_line, print_table

if TYPE_CHECKING:
    from opd.live.view import View

app = typer.Typer()

RUN_COLUMNS = ("run", "state", "steps", "headroom recovered", "last written", "on disk")
LOOK_S = 2.0
"""Shortest pause between two looks at a run directory, in seconds."""
PAUSE_FACTOR = 10
"""A pause lasts so many times as long as the look before it: the merge may be at work on the same cores."""
ALL_LINES = 200
"""Lines for a view that is printed once, more than any view has."""


@app.command(
    epilog=help_examples("opd status runs/mine", "opd status runs/mine --watch", "opd status runs/mine --json")
)
def status(
    run_dir: Annotated[
        Path,
        typer.Argument(
            help="Run directory of a merge: at work, stopped, killed or finished.",
            autocompletion=completion.complete_runs,
        ),
    ],
    watch: Annotated[bool, typer.Option("--watch", help="Look again every two seconds until the merge ends.")] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="As a line of JSON; with --watch one after each step.")
    ] = False,
) -> None:
    """Show how far a merge is, from its run directory alone, and what to do next."""
    from opd.live.status import read_view

    if not watch:
        view = read_view(run_dir)
        if as_json:
            _print_json(view)
        else:
            _print_view(view)
    elif as_json or not is_terminal(sys.stdout):
        _follow_run(run_dir, as_json)
    else:
        _watch_run(run_dir)


@app.command(epilog=help_examples("opd runs", "opd runs /data/runs"))
def runs(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="Where to look for runs.")] = Path("runs"),
) -> None:
    """List all runs in a directory: state, steps, headroom, when, and size on disk."""
    from opd.errors import RunDirError
    from opd.live.render import format_bytes
    from opd.live.status import list_runs
    from opd.report.tables import format_share

    if not directory.is_dir():
        raise RunDirError.at(
            directory,
            found="no such directory",
            wanted="a directory with runs",
            fix="`opd merge PIPELINE` makes runs/NAME",
        )
    rows = [
        (
            str(row.root),
            row.view.state,
            f"{row.view.done}/{row.view.steps}",
            format_share(row.view.mean_headroom),
            f"{row.written:%Y-%m-%d %H:%M}",
            format_bytes(row.size),
        )
        for row in list_runs(directory)
    ]
    if rows:
        print_table(str(directory), RUN_COLUMNS, rows)
    else:
        print_line(f"{directory}: no run in it; `opd merge PIPELINE` makes runs/NAME")


def _print_view(view: View) -> None:
    """Print the view once. The hints come below it in full lines, so that their commands can be copied."""
    from rich.console import Console

    from opd.live.render import RunScreen

    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = 100
    console.print(RunScreen(replace(view, hints=()), ALL_LINES))
    for hint in view.hints:
        print_line(hint, err=False)


def _print_json(view: View) -> None:
    from opd.live.displays import print_json

    # `losses` has a number for every step of the run; metrics.jsonl has them too.
    data = {key: value for key, value in asdict(view).items() if key != "losses"}
    print_json({"event": "status"} | data)


def _watch_run(run_dir: Path) -> None:
    """Show the run on the screen until it ends; the last view stays there."""
    from rich.console import Console
    from rich.live import Live

    from opd.live.render import RunScreen

    with Live(console=Console(), auto_refresh=False) as live:
        for view in _poll_run(run_dir):
            live.update(RunScreen(view), refresh=True)


def _follow_run(run_dir: Path, as_json: bool) -> None:
    """Print a line after each step, and one at the end."""
    from opd.live.render import format_view

    last_progress: tuple[int, str] | None = None
    for view in _poll_run(run_dir):
        if last_progress != (view.done, view.state):
            if as_json:
                _print_json(view)
            else:
                print_line(format_view(view), err=False)
            last_progress = (view.done, view.state)


def _poll_run(run_dir: Path) -> Iterator[View]:
    """Yield a view of the run now and then, until the merge is no longer at work."""
    from opd.live.status import read_view
    from opd.live.view import RUNNING

    while True:
        began = time.monotonic()
        view = read_view(run_dir)
        yield view
        if view.state != RUNNING:
            return
        time.sleep(max(LOOK_S, PAUSE_FACTOR * (time.monotonic() - began)))
