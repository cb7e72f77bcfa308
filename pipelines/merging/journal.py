"""A merge says in its run directory what it does, so that `opd status` can tell from elsewhere."""

from __future__ import annotations

import os
import socket
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from datetime import UTC, datetime
from types import TracebackType

from opd.errors import Paused
from opd.live.displays import RunStart, Displays
from opd.live.interfaces import Display
from opd.live.now import FAILED, FINISHED, PAUSED, STOPPED, LiveState
from opd.records.step import StepRecord
from opd.run.paths import RunPaths
from pipelines.interrupts import Interrupted


class Journal:
    """The file `.live.json` of one merge. If an error ends the block, its message is written there."""

    def __init__(self, paths: RunPaths) -> None:
        self._paths = paths
        began = datetime.now(UTC).isoformat(timespec="seconds")
        self.now = LiveState(pid=os.getpid(), host=socket.gethostname(), began=began)

    def __enter__(self) -> Journal:
        self.write()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        if error is None:
            self.now = replace(self.now, doing="", ended=FINISHED)
            self.write()
            return
        self.now = replace(self.now, doing="", ended=end_of(error), why=str(error) or type(error).__name__)
        with suppress(OSError):  # on a full disk the error that ends the run is the one to tell
            self.write()

    def write(self) -> None:
        """Bring the file up to date. Raises: OSError."""
        self.now.write(self._paths.live, self._paths.scratch_path(self._paths.live.name))

    def write_beside(self, displays: Displays) -> Displays:
        """Return the same displays, with everything that they are told also written into the journal."""

        @contextmanager
        def open_both(beginning: RunStart) -> Iterator[Display]:
            with displays(beginning) as display:
                journal_display = _JournalDisplay(self, display)
                journal_display.doing("Ray starts")
                yield journal_display

        return open_both


class _JournalDisplay:
    """Display that passes everything on to another one, and notes it in the journal."""

    def __init__(self, journal: Journal, display: Display) -> None:
        self._journal = journal
        self._display = display

    def say(self, line: str) -> None:
        # Not written yet: a signal's handler, which says things too, may come while the file is being written.
        self._journal.now = self._journal.now.with_note(line)
        self._display.say(line)

    def doing(self, activity: str) -> None:
        self._journal.now = replace(self._journal.now, doing=activity)
        self._journal.write()
        self._display.doing(activity)

    def exams(
        self, before: Mapping[str, float], expert: Mapping[str, float], clear: Collection[str] | None = None
    ) -> None:
        self._display.exams(before, expert, clear)

    def step(self, record: StepRecord) -> None:
        self._display.step(record)


def end_of(error: BaseException) -> str:
    """Return the kind of end that this error means for a merge: one of `opd.live.now.ENDS`."""
    if isinstance(error, Paused):
        return PAUSED
    return STOPPED if isinstance(error, Interrupted | KeyboardInterrupt) else FAILED
