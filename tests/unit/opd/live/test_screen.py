"""A user's view of a merge: on a real terminal, elsewhere, as JSON, and not at all."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import struct
import subprocess
import sys
import termios
from pathlib import Path
from typing import Any

import pytest

from opd.live.displays import CHOICES, RunStart
from tests.terminal import Terminal
from tests.unit.opd.live.made import NOTES, SNAPSHOTS, record
from tests.unit.opd.live.test_render import COLOURS
from tests.unit.sources import ROOT

BEGUN = RunStart("two", Path("runs/two"), 4, ("math",))


def on_terminal(width: int, height: int, how: str = "", **env: str) -> tuple[Terminal, Terminal, int]:
    """The terminal while the screen was on it and at the end, and the exit code."""
    driver, user = pty.openpty()
    fcntl.ioctl(user, termios.TIOCSWINSZ, struct.pack("HHHH", height, width, 0, 0))
    colours = {name: os.environ[name] for name in os.environ.keys() - {"NO_COLOR", "FORCE_COLOR", "COLUMNS", "LINES"}}
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.unit.opd.live.on_a_terminal", how],
        stdin=user, stdout=user, stderr=user, cwd=ROOT, env=colours | {"TERM": "xterm-256color"} | env,
    )  # fmt: skip
    os.close(user)
    written = b""
    try:
        while part := os.read(driver, 1 << 16):
            written += part
    except OSError:  # Linux: the other side was closed
        pass
    os.close(driver)
    during, after = Terminal(width, height), Terminal(width, height)
    text = written.decode()
    assert "\a" in text, text
    during.feed(text.partition("\a")[0])
    after.feed(text.replace("\a", ""))
    return during, after, process.wait(60)


@pytest.mark.parametrize(("width", "height", "how"), [(80, 24, "long"), (160, 50, "")])
def test_one_screen_on_a_terminal(width: int, height: int, how: str) -> None:
    """With `WRITE_SNAPSHOTS=1` in the environment this writes its snapshots again: look at what changed."""
    during, after, code = on_terminal(width, height, how)
    snapshot = SNAPSHOTS / f"terminal-{width}x{height}.txt"
    if "WRITE_SNAPSHOTS" in os.environ:
        snapshot.write_text("\n".join(during.screen) + "\n", encoding="utf-8")
    assert "\n".join(during.screen) + "\n" == snapshot.read_text(encoding="utf-8")
    assert (code, during.wrapped, after.cursor_shown) == (0, 0, True)
    assert {"31", "35", "32"} & during.styles and during.styles <= COLOURS | {""}
    kept = "".join(line.ljust(width) for line in after.lines)  # a sentence may take several lines there
    assert [kept.count(note) for note in NOTES] == [1] * len(NOTES), "each once, and whole"
    assert "━" not in kept and "step 122/300  loss 0.2231" in kept, "the screen is gone, its last step stays"


def test_no_colour_a_signal_and_an_error_that_leaves_a_clean_terminal() -> None:
    during, after, code = on_terminal(80, 24, "error", NO_COLOR="1")
    assert during.styles <= {"", "0", "1"} and "━" in "".join(during.screen)
    assert during.screen[-1].startswith("Ctrl-C: finishing this step, then a checkpoint")
    assert code == 3 and after.cursor_shown and "━" not in "".join(after.lines)


def shown(quiet: bool, as_json: bool, capsys: Any) -> tuple[str, str]:
    with CHOICES[quiet, as_json](BEGUN) as display:
        display.say("warning: \x1b]0;mine\x07 [red]x[/red]")
        display.doing("rollout")
        display.exams({}, {})
        display.step(record(1, ("math",)))
        display.step(record(2, ("math",), exam=True))
    found = capsys.readouterr()
    return found.out, found.err


LINES = """\
warning: \\x1b]0;mine\\x07 [red]x[/red]
step 1/4  loss 2.2222  571 tok/s  gap 1.5e-06  about 7 s left
step 2/4  loss 2.0000  326 tok/s  gap 1.5e-06  accuracy 0.213  about 7 s left
"""


def test_elsewhere_a_line_for_each_step(capsys: Any) -> None:
    assert shown(False, False, capsys) == ("", LINES)


def test_a_quiet_merge_says_nothing(capsys: Any) -> None:
    assert shown(True, False, capsys) == ("", "")


@pytest.mark.parametrize("quiet", [False, True])
def test_json_is_a_line_for_each_step(quiet: bool, capsys: Any) -> None:
    out, err = shown(quiet, True, capsys)
    lines = [json.loads(line) for line in out.splitlines()]
    assert [(line["event"], line["step"], line["steps"]) for line in lines] == [("step", 1, 4), ("step", 2, 4)]
    assert lines[1] == {"event": "step", "steps": 4} | json.loads(json.dumps(record(2, ("math",), exam=True).to_json()))
    assert err == ("" if quiet else LINES.splitlines(keepends=True)[0])
