"""The effects of Ctrl-C and SIGTERM at each moment."""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from pipelines.interrupts import Interrupted, Stopped, interrupts

ROOT = Path(__file__).parents[3]
BOTH = pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])


@BOTH
def test_the_first_asks_and_the_second_ends(number: int) -> None:
    said: list[str] = []
    before = signal.getsignal(number)
    with interrupts() as found:
        with found.handle_first_signal(said.append):
            assert not found.should_leave()
            signal.raise_signal(number)
            assert found.should_leave() and found.number == number
            with pytest.raises(Stopped) as stop:
                signal.raise_signal(number)
        assert stop.value.number == number
    assert len(said) == 1 and "finishing this step" in said[0]
    assert signal.getsignal(number) is before


@BOTH
def test_where_there_is_no_step_the_first_ends(number: int) -> None:
    with interrupts() as found:
        with found.handle_first_signal(print):
            pass
        with pytest.raises(Stopped):
            signal.raise_signal(number)
        assert found.should_leave()


def test_the_command_that_goes_on_can_be_pasted() -> None:
    (command,) = re.findall("`(.*)`", str(Interrupted(3, Path("runs/my run"), signal.SIGINT)))
    assert shlex.split(command) == ["opd", "merge", "--resume", "runs/my run"]


def test_within_another_it_is_that_one() -> None:
    with interrupts() as outer:
        inside = signal.getsignal(signal.SIGINT)
        with interrupts() as found, found.handle_first_signal(lambda line: None):
            signal.raise_signal(signal.SIGINT)
        assert found is outer and outer.should_leave(), "what came inside is known outside"
        assert signal.getsignal(signal.SIGINT) == inside
    assert signal.getsignal(signal.SIGINT) != inside


def test_one_of_each_is_two() -> None:
    with interrupts() as found, found.handle_first_signal(lambda line: None):
        signal.raise_signal(signal.SIGTERM)
        with pytest.raises(Stopped):
            signal.raise_signal(signal.SIGINT)
        assert found.number == signal.SIGTERM, "what was asked first decides how the run ended"


def test_elsewhere_than_in_the_main_thread_nothing_comes() -> None:
    seen: list[bool] = []

    def work() -> None:
        with interrupts() as found:
            seen.append(found.should_leave())

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [False]


CHILD = """
import subprocess, sys, time
from opd.machine import orphans
from pipelines.interrupts import interrupts

with interrupts():
    with orphans.mark_children():
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    try:
        print(child.pid, flush=True)
        time.sleep(600)
    finally:
        time.sleep(600)  # an ending that takes too long
"""


def test_a_third_does_not_wait_for_the_ending_and_leaves_no_child() -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", CHILD], stdout=subprocess.PIPE, text=True, env=os.environ | {"PYTHONPATH": str(ROOT)}
    )
    assert process.stdout is not None
    child = int(process.stdout.readline())
    process.send_signal(signal.SIGINT)
    time.sleep(0.5)
    assert process.poll() is None
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=20) == 130
    for _ in range(100):
        state = Path(f"/proc/{child}/stat")
        if not state.exists() or state.read_text().split()[2] == "Z":
            return
        time.sleep(0.05)
    pytest.fail("the child lives")
