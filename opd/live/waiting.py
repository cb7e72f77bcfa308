"""The line on the screen before a merge begins. It is apart from `displays`, whose tables and curves nobody needs for bad
input."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.live import Live
from rich.text import Text

from opd.live.shapes import format_duration
from opd.text import escape_control_characters


@contextmanager
def show_waiting(activity: str) -> Iterator[None]:
    """Within, a terminal says what it waits for and for how long. The line goes away; elsewhere nothing is said."""
    console = Console(stderr=True)
    if not sys.stderr.isatty() or console.is_dumb_terminal:
        yield
        return
    began = time.monotonic()

    def line() -> Text:
        return Text(
            f"{escape_control_characters(activity)}, {format_duration(time.monotonic() - began)}",
            no_wrap=True,
            overflow="ellipsis",
        )

    with Live(console=console, get_renderable=line, refresh_per_second=1, transient=True):
        yield
