"""Everything that belongs to a driver that is gone is cleared, and nothing else."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from opd.machine import orphans

ROOT = Path(__file__).parents[4]
DRIVER = """
import subprocess, sys, time
from opd.machine import orphans
if {marked}:
    with orphans.mark_children():
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
else:
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
print(child.pid, orphans.directory_prefix(), flush=True)
time.sleep(600)
"""


class Driver:
    """A process that started another one."""

    def __init__(self, marked: bool) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", DRIVER.format(marked=marked)],
            stdout=subprocess.PIPE, text=True, env=os.environ | {"PYTHONPATH": str(ROOT)},
        )  # fmt: skip
        assert self.process.stdout is not None
        pid, self.prefix = self.process.stdout.readline().split()
        self.child = psutil.Process(int(pid))

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def child_lives(self) -> bool:
        return self.child.is_running() and self.child.status() != psutil.STATUS_ZOMBIE


@pytest.fixture
def drivers() -> Iterator[Any]:
    started: list[Driver] = []

    def start(marked: bool = True) -> Driver:
        started.append(Driver(marked))
        return started[-1]

    yield start
    for driver in started:
        driver.kill()
        if driver.child_lives():
            driver.child.kill()


@pytest.fixture(autouse=True)
def places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Path]:
    found = {name: tmp_path / name for name in ("shm", "tmp")}
    for path in found.values():
        path.mkdir()
    monkeypatch.setattr(orphans, "SHARED_MEMORY", found["shm"])
    monkeypatch.setattr("tempfile.tempdir", str(found["tmp"]))
    return found


def test_processes_of_a_driver_that_was_killed_are_ended_also_stopped_ones(drivers: Any) -> None:
    gone, alive, stranger = drivers(), drivers(), drivers(marked=False)
    gone.child.send_signal(signal.SIGSTOP)
    orphans.end_orphans()  # also of what others have left on this machine
    assert gone.child_lives() and alive.child_lives() and stranger.child_lives()
    gone.kill()
    stranger.kill()
    assert any(line.startswith(f"process {gone.child.pid} (") for line in orphans.end_orphans())
    assert not gone.child_lives() and alive.child_lives() and stranger.child_lives()
    assert not any(line.startswith(f"process {gone.child.pid} (") for line in orphans.end_orphans())


def test_programs_of_a_worker_that_was_killed_are_ended_and_those_of_another_are_not(
    drivers: Any, places: dict[str, Path]
) -> None:
    with orphans.mark_children():  # as workers of this driver
        dead, alive = drivers(marked=False), drivers(marked=False)
        theirs = [
            subprocess.Popen(
                [sys.executable, "-c", "import time; time.sleep(600)"],
                env=os.environ | {orphans.OWNER: worker.prefix.removeprefix("opd-run-").removesuffix("-")},
            )
            for worker in (dead, alive)
        ]
    folder = places["tmp"] / f"{dead.prefix}agent-x"
    folder.mkdir()
    try:
        assert orphans.end_abandoned_processes() == [] and folder.exists()
        dead.kill()
        found = orphans.end_abandoned_processes()
        assert len(found) == 2 and found[0].startswith(f"process {theirs[0].pid} (") and found[1] == str(folder)
        assert not psutil.pid_exists(theirs[0].pid) and theirs[1].poll() is None
        assert alive.child_lives() and dead.child_lives(), "what is no program of an agent is left to `end_own`"
    finally:
        for program in theirs:
            program.kill()
            program.wait()


def test_directories_go_with_their_driver(drivers: Any, places: dict[str, Path]) -> None:
    driver = drivers()
    theirs = places["shm"] / f"{driver.prefix}weights-000001-x", places["tmp"] / f"{driver.prefix}weights-000002-y"
    kept = [
        places["shm"] / f"{orphans.directory_prefix()}weights-000001-z", places["tmp"] / "opd-notes", places["tmp"] / "other"
    ]  # fmt: skip
    for path in (*theirs, *kept):
        path.mkdir()
        (path / "model.safetensors").write_bytes(b"x")
    assert orphans.end_orphans() == []
    driver.kill()
    assert set(map(str, theirs)) < set(orphans.end_orphans())
    assert not any(path.exists() for path in theirs) and all(path.exists() for path in kept)


def gone_prefix() -> str:
    """Of a driver that is no more."""
    _, start, namespace = orphans.driver_mark().split("-")
    return f"opd-run-{2**22 + 1}-{start}-{namespace}-"  # above the largest number of a process


def test_what_a_driver_of_another_container_has_is_left_alone(places: dict[str, Path]) -> None:
    """Its number says nothing here: nobody has it, or somebody else."""
    ours = gone_prefix()
    number, start, namespace = ours.split("-")[2:5]
    theirs = f"opd-run-{number}-{start}-{int(namespace) + 1}-"
    for prefix in (ours, theirs, "opd-notes-"):
        (places["tmp"] / f"{prefix}weights").mkdir()
    with subprocess.Popen(
        [sys.executable, "-c", "import time; time.sleep(600)"],
        env=os.environ | {orphans.VARIABLE: theirs.removeprefix("opd-run-").removesuffix("-")},
    ) as process:
        assert orphans.end_orphans() == [str(places["tmp"] / f"{ours}weights")]
        assert process.poll() is None
        process.kill()


def test_a_clock_that_is_set_changes_no_mark(drivers: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """psutil counts a process's start from the machine's, by the clock."""
    driver, before = drivers(), orphans.driver_mark()
    monkeypatch.setattr("psutil._pslinux.boot_time", lambda: 1.0e9)
    assert psutil.Process(driver.process.pid).create_time() < 1.1e9
    assert orphans.driver_mark() == before
    assert orphans.end_orphans() == [] and driver.child_lives()


def test_a_link_is_not_followed(places: dict[str, Path], tmp_path: Path) -> None:
    mine = tmp_path / "mine"
    mine.mkdir()
    link = places["tmp"] / f"{gone_prefix()}weights"
    link.symlink_to(mine)
    orphans.end_orphans()
    assert mine.is_dir()


def test_a_number_that_another_process_has_now_is_no_life(drivers: Any, places: dict[str, Path]) -> None:
    pid, _, namespace = orphans.driver_mark().split("-")
    theirs = places["shm"] / f"opd-run-{pid}-1-{namespace}-weights"  # our number, another start
    theirs.mkdir()
    orphans.end_orphans()
    assert not theirs.exists()


def test_own_processes_are_ended_and_the_mark_does_not_stay() -> None:
    with orphans.mark_children():
        own = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    other = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    try:
        assert orphans.VARIABLE not in os.environ
        assert len(orphans.end_own_processes()) == 1
        assert not psutil.pid_exists(own.pid) and other.poll() is None
    finally:
        other.kill()
        other.wait()


@pytest.mark.parametrize("variable", ["RAY_TMPDIR", "TMPDIR"])
def test_a_directory_with_a_short_name_is_private_and_goes_with_its_driver(
    variable: str, drivers: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RAY_TMPDIR", raising=False)
    monkeypatch.setenv(variable, str(tmp_path))
    before = os.umask(0)
    try:
        made = [orphans.make_short_directory(tmp_path) for _ in range(2)]
    finally:
        os.umask(before)
    assert all(path.stat().st_mode & 0o777 == 0o700 and len(path.name) == 16 for path in made)
    theirs, unmarked = tmp_path / "opd-ray-theirs", tmp_path / "opd-ray-unmarked"
    for path in (theirs, unmarked):
        path.mkdir()
    (theirs / "opd-driver").write_text(gone_prefix().removeprefix("opd-run-").removesuffix("-"))
    assert str(theirs) in orphans.end_orphans()
    assert not theirs.exists() and unmarked.exists() and all(path.exists() for path in made)
