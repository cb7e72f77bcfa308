"""Write into the run directory what a merge does at the moment, for `opd status` in another process."""

from __future__ import annotations

import os
import socket
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from datetime import UTC, datetime
from types import TracebackType

from opd.errors import Paused
from opd.live.displays import Displays, RunStart
from opd.live.interfaces import Display
from opd.live.live_state import FAILED, FINISHED, PAUSED, STOPPED, LiveState
from opd.records.step import StepRecord
from opd.run.paths import RunPaths
from pipelines.interrupts import Interrupted


class Journal:
    """The file `.live.json` of one merge. The end of the block is noted there, and the message of an error that ends it."""

    def __init__(self, paths: RunPaths) -> None:
        self._paths = paths
        began = datetime.now(UTC).isoformat(timespec="seconds")
        self.state = LiveState(pid=os.getpid(), host=socket.gethostname(), began=began)

    def __enter__(self) -> Journal:
        self.write()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        if error is None:
            self.state = replace(self.state, doing="", ended=FINISHED)
            self.write()
            return
        self.state = replace(self.state, doing="", ended=classify_end(error), why=str(error) or type(error).__name__)
        with suppress(OSError):  # on a full disk the error that ends the run is the one to tell
            self.write()

    def write(self) -> None:
        """Write the state to the file. Raises: OSError."""
        self.state.write(self._paths.live, self._paths.scratch_path(self._paths.live.name))

    def write_beside(self, displays: Displays) -> Displays:
        """Return the same displays, with everything that they are told also written into the journal."""

        @contextmanager
        def open_both(beginning: RunStart) -> Iterator[Display]:
            with displays(beginning) as display:
                journal_display = _JournalDisplay(self, display)
                journal_display.doing("Ray starts")
                yield journal_display

        return open_both


class _JournalDisplay(Display):
    """Display that passes everything on to another one, and notes messages and phases in the journal."""

    def __init__(self, journal: Journal, display: Display) -> None:
        self._journal = journal
        self._display = display

    def say(self, line: str) -> None:
        # Kept for the next write: a signal's handler, which says things too, may come while the file is being written.
        self._journal.state = self._journal.state.with_note(line)
        self._display.say(line)

    def doing(self, activity: str) -> None:
        self._journal.state = replace(self._journal.state, doing=activity)
        self._journal.write()
        self._display.doing(activity)

    def exams(
        self, before: Mapping[str, float], expert: Mapping[str, float], clear: Collection[str] | None = None
    ) -> None:
        self._display.exams(before, expert, clear)

    def step(self, record: StepRecord) -> None:
        self._display.step(record)


def classify_end(error: BaseException) -> str:
    """Return the kind of end that this error means for a merge: one of `opd.live.live_state.ENDS`."""
    if isinstance(error, Paused):
        return PAUSED
    return STOPPED if isinstance(error, Interrupted | KeyboardInterrupt) else FAILED
