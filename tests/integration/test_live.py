"""The screen of a real merge on a real terminal, `opd status` beside it, and Ctrl-C."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from pathlib import Path
from typing import Any

import pytest

from tests.integration.conftest import write_pipeline
from tests.terminal import Terminal
from tests.unit.sources import ROOT

DEADLINE_S = 240.0


def opd(*args: str | Path, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "cli", *map(str, args)],
        cwd=cwd, env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=60,
    )  # fmt: skip


@pytest.mark.slow
def test_a_real_merge_on_one_screen_until_ctrl_c(tmp_path: Path, pipeline: dict[str, Any]) -> None:
    pipeline["trainer"]["steps"] = 2000
    file = write_pipeline(tmp_path, pipeline)
    driver, user = pty.openpty()
    fcntl.ioctl(user, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    process = subprocess.Popen(
        [sys.executable, "-m", "cli", "merge", str(file), "--run-dir", str(tmp_path / "run")],
        stdin=user, stdout=user, stderr=user, cwd=tmp_path, start_new_session=True,
        env=os.environ | {"PYTHONPATH": str(ROOT), "TERM": "xterm-256color"},
    )  # fmt: skip
    os.close(user)
    terminal, seen, beside = Terminal(80, 24), [], ""
    deadline = time.monotonic() + DEADLINE_S
    rest = b""
    while time.monotonic() < deadline:
        if not select.select([driver], [], [], 1.0)[0]:
            continue
        try:
            rest += os.read(driver, 1 << 16)
        except OSError:
            break
        text, _, tail = rest.rpartition(b"\n")  # a sequence or a character may come in two parts
        rest = tail
        terminal.feed((text + b"\n").decode() if text else "")
        screen = "\n".join(terminal.screen)
        if not seen or seen[-1] != screen:
            seen.append(screen)
        if re.search(r"step [1-9]\d* of 2000", screen) and not beside:
            beside = opd("status", tmp_path / "run", cwd=tmp_path).stdout
            process.send_signal(signal.SIGINT)
    os.close(driver)
    terminal.feed(rest.decode())
    assert process.wait(60) == 130, seen[-1]
    print("\n\n".join(seen))
    print(beside)
    all_of_it = "\n".join(seen)
    for words in (
        "reading models and prompts",
        "loading: rollout engine",
        "rollout engine: up after",
        "before the merge: mean accuracy",
    ):
        assert words in all_of_it, words
    assert "two  running" in beside and "loss" in beside and "workers" in beside
    assert terminal.cursor_shown
    after = opd("status", tmp_path / "run", cwd=tmp_path)
    assert after.returncode == 0 and "two  stopped" in after.stdout and "opd merge --resume" in after.stdout
