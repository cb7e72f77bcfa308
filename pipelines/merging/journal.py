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
from opd.live.displays import Beginning, Displays
from opd.live.interfaces import Display
from opd.live.now import FAILED, FINISHED, PAUSED, STOPPED, Now
from opd.records.step import StepRecord
from opd.run.paths import RunPaths
from pipelines.interrupts import Interrupted


class Journal:
    """The file `.live.json` of one merge. If an error ends the block, its message is written there."""

    def __init__(self, paths: RunPaths) -> None:
        self._paths = paths
        began = datetime.now(UTC).isoformat(timespec="seconds")
        self.now = Now(pid=os.getpid(), host=socket.gethostname(), began=began)

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
        def both(begun: Beginning) -> Iterator[Display]:
            with displays(begun) as shown:
                told = _JournalDisplay(self, shown)
                told.doing("Ray starts")
                yield told

        return both


class _JournalDisplay:
    """Display that passes everything on to another one, and notes it in the journal."""

    def __init__(self, journal: Journal, shown: Display) -> None:
        self._journal = journal
        self._shown = shown

    def say(self, line: str) -> None:
        # Not written yet: a signal's handler, which says things too, may come while the file is being written.
        self._journal.now = self._journal.now.with_note(line)
        self._shown.say(line)

    def doing(self, what: str) -> None:
        self._journal.now = replace(self._journal.now, doing=what)
        self._journal.write()
        self._shown.doing(what)

    def exams(
        self, before: Mapping[str, float], expert: Mapping[str, float], clear: Collection[str] | None = None
    ) -> None:
        self._shown.exams(before, expert, clear)

    def step(self, record: StepRecord) -> None:
        self._shown.step(record)


def end_of(error: BaseException) -> str:
    """Return the kind of end that this error means for a merge: one of `opd.live.now.ENDS`."""
    if isinstance(error, Paused):
        return PAUSED
    return STOPPED if isinstance(error, Interrupted | KeyboardInterrupt) else FAILED
