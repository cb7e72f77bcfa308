"""A signal in the middle of an import waits for its end, and is neither lost nor fatal."""

from __future__ import annotations

import importlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest

from opd.machine import signals
from opd.machine.signals import postpone_interrupts
from pipelines.interrupts import Stopped, interrupts

ROOT = Path(__file__).parents[4]

MODULE = """
import signal
signal.raise_signal({number})
for _ in range(100_000):  # where Python would look for signals
    pass
whole = True
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Name of a module that sends this process SIGINT while it is imported; another number is written into its file."""
    (tmp_path / "interrupted.py").write_text(MODULE.format(number=int(signal.SIGINT)))
    monkeypatch.syspath_prepend(tmp_path)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield "interrupted"
    signal.signal(signal.SIGINT, before)
    sys.modules.pop("interrupted", None)


def wait() -> None:
    time.sleep(20)
    pytest.fail("the signal is lost")


def test_without_patience_the_import_is_cut_short(module: str) -> None:
    with pytest.raises(KeyboardInterrupt):
        importlib.import_module(module)
    assert module not in sys.modules


def test_ctrl_c_comes_after_the_import(module: str) -> None:
    with pytest.raises(KeyboardInterrupt), postpone_interrupts():
        importlib.import_module(module)
        wait()
    assert sys.modules[module].whole
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_ctrl_c_in_a_destructor_is_not_lost() -> None:
    class Interrupted:
        def __del__(self) -> None:
            signal.raise_signal(signal.SIGINT)
            for _ in range(100_000):  # where Python would look for signals
                pass

    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt), postpone_interrupts():
            Interrupted()
            wait()
    finally:
        signal.signal(signal.SIGINT, before)


def test_a_command_that_ends_first_does_not_lose_it(module: str) -> None:
    with pytest.raises(KeyboardInterrupt), postpone_interrupts():
        importlib.import_module(module)
    assert sys.modules[module].whole
    nothing_comes_later(0.2)


def nothing_comes_later(seconds: float) -> None:
    try:
        time.sleep(seconds)
    except KeyboardInterrupt:  # which would end the whole session
        pytest.fail("the signal came again")


@pytest.mark.parametrize("within", [postpone_interrupts, interrupts], ids=["patient", "interrupts"])
def test_one_that_is_on_its_way_does_not_come_after_the_end(
    within: Callable[[], AbstractContextManager[Any]], module: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    kill, sends = signal.pthread_kill, threading.Event()

    def slow(thread: int, number: int) -> None:
        sends.set()
        time.sleep(0.3)
        kill(thread, number)

    monkeypatch.setattr(signal, "pthread_kill", slow)
    with pytest.raises(KeyboardInterrupt), within():
        importlib.import_module(module)
        assert sends.wait(5)
        signals._pending_signal = None  # as if an earlier one had been taken just now
        raise KeyboardInterrupt
    nothing_comes_later(0.6)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_what_ends_a_run_comes_after_the_import_too(number: signal.Signals, module: str, tmp_path: Path) -> None:
    (tmp_path / "interrupted.py").write_text(MODULE.format(number=int(number)))
    with pytest.raises(Stopped) as stop, interrupts() as found:
        importlib.import_module(module)
        assert not found.should_leave()
        wait()
    assert sys.modules[module].whole
    assert stop.value.number == found.number == number


def test_a_step_is_asked_to_be_the_last_at_once(module: str) -> None:
    said: list[str] = []
    with interrupts() as found, found.handle_first_signal(said.append):
        importlib.import_module(module)
        assert found.should_leave() and len(said) == 1
        time.sleep(0.2)
    assert sys.modules[module].whole


def test_one_that_is_sent_twice_is_taken_once(module: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(KeyboardInterrupt), postpone_interrupts():
        importlib.import_module(module)
        wait()
    assert sys.modules[module].whole
    with postpone_interrupts():
        monkeypatch.setattr(signals, "_is_resent", True)  # as it is if the thread sends while the main one takes
        signal.raise_signal(signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)


def test_another_signal_does_not_wait_for_an_import_that_hangs(module: str, tmp_path: Path) -> None:
    (tmp_path / f"{module}.py").write_text("import time\nprint('importing', flush=True)\ntime.sleep(600)\n")
    code = f"from opd.machine.signals import postpone_interrupts\nwith postpone_interrupts():\n    import {module}"
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, env=os.environ | {"PYTHONPATH": f"{ROOT}:{tmp_path}"}
    )
    assert process.stdout is not None and process.stdout.readline()
    process.send_signal(signal.SIGINT)
    time.sleep(0.5)
    assert process.poll() is None
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=20) == 130


COMMAND = """
import signal, sys
where, under = sys.argv.pop(1), []

def look(frame, event, arg):
    if event == "c_call":
        under.append(arg.__name__)
    elif event in ("c_return", "c_exception"):
        under.pop()
    elif event == "call" and under and under[-1] == where:
        sys.setprofile(None)
        print("reached", where, flush=True)
        signal.raise_signal(signal.SIGINT)

from cli import app
sys.setprofile(look)
app()
"""


@pytest.mark.parametrize("where", ["_c10d_init", "_multiprocessing_init"])
def test_ctrl_c_while_torch_is_imported_ends_a_command_as_anywhere_else(where: str, world: Any) -> None:
    """These C++ functions of torch call Python, and a KeyboardInterrupt there was the process's abort, exit code 134."""
    done = subprocess.run(
        [sys.executable, "-c", COMMAND, where, "merge", "pipeline.yaml", "--run-dir", "run"],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.stdout == f"reached {where}\n", done.stderr[-2000:]
    assert (done.returncode, done.stderr) == (130, "stopped by Ctrl-C\n")
