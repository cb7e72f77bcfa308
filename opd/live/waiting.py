"""The line on the screen until a merge begins. It is a module of its own so that a refusal of bad input does not wait for the
imports of `displays`."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn

from opd.text import escape_control_characters


@contextmanager
def show_waiting(activity: str) -> Iterator[None]:
    """Make a context in which a terminal shows what the user waits for, and for how long. The line goes away at the end.

    If standard error is no terminal, nothing is shown.
    """
    console = Console(stderr=True)
    hidden = not sys.stderr.isatty() or console.is_dumb_terminal
    columns = SpinnerColumn("line"), TextColumn("{task.description}, {task.elapsed:.0f} s", markup=False)
    with Progress(*columns, console=console, refresh_per_second=4, transient=True, disable=hidden) as progress:
        progress.add_task(escape_control_characters(activity))
        yield
