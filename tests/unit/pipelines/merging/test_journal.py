"""A merge's account of itself in its run directory, from its first word to its last."""

from __future__ import annotations

import errno
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from opd.errors import Paused, RunError
from opd.live.displays import RunStart
from opd.live.interfaces import Display
from opd.live.live_state import FAILED, FINISHED, PAUSED, STOPPED, LiveState, read_live_state
from opd.run.paths import RunPaths
from pipelines.interrupts import Interrupted, Stopped
from pipelines.merging.journal import Journal


def last_word(paths: RunPaths) -> tuple[str, str]:
    found = read_live_state(paths.live)
    assert found is not None
    return found.ended, found.why


@pytest.mark.parametrize(
    ("error", "ended"),
    [
        (Interrupted(5, Path("runs/two"), 2), STOPPED),
        (Stopped(15), STOPPED),
        (KeyboardInterrupt(), STOPPED),
        (Paused("step 5: look"), PAUSED),
        (RunError("a worker is gone"), FAILED),
        (ZeroDivisionError(), FAILED),
    ],
)
def test_every_end_leaves_a_word_and_goes_on_its_way(error: BaseException, ended: str, tmp_path: Path) -> None:
    paths = RunPaths(tmp_path)
    with pytest.raises(type(error)), Journal(paths):
        assert last_word(paths) == ("", "")
        raise error
    assert last_word(paths) == (ended, str(error) or type(error).__name__)


def test_what_the_display_is_told_is_written_down(tmp_path: Path) -> None:
    told: list[str] = []

    class Heard(Display):
        def say(self, line: str) -> None:
            told.append(line)

    @contextmanager
    def displays(begun: RunStart) -> Any:
        yield Heard()

    paths = RunPaths(tmp_path)
    with Journal(paths) as journal, journal.write_beside(displays)(RunStart("two", tmp_path, 4)) as shown:
        for number in range(30):
            shown.say(f"line {number}")
        shown.doing("train")
        found = read_live_state(paths.live)
        assert found is not None and (found.doing, found.notes) == ("train", tuple(f"line {n}" for n in range(10, 30)))
    assert len(told) == 30 and last_word(paths) == (FINISHED, "")
    assert [path.name for path in tmp_path.iterdir()] == [".live.json"]


def test_a_full_disk_is_told_by_the_error_that_met_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(self: LiveState, path: Path, scratch: Path) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", str(path))

    paths = RunPaths(tmp_path)
    with pytest.raises(RunError, match="the first"), Journal(paths):
        monkeypatch.setattr(LiveState, "write", full)
        raise RunError("the first")
    with pytest.raises(OSError, match="No space left"):
        Journal(paths).__enter__()
