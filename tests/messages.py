"""The words in which `opd` refuses something, kept as they are in `messages.txt` beside this file.

Tests call `opd` of this module, and then `check(NAME)`: what was refused since the last check must be what the file has under
that name. `python -m tests.make_messages` writes the file anew; its changes are then read in `git diff` like any others.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from typer.testing import CliRunner, Result

from cli import app

FILE = Path(__file__).parent / "messages.txt"
REMAKE = "OPD_MAKE_MESSAGES"
"""Environment variable that is set while the file is made anew."""
_HEADING = re.compile(r"^## (.+)\n\n", re.MULTILINE)
_said: list[str] = []


def opd(*args: str | Path) -> Result:
    """Run a command in this process, and keep what it says if it ends with exit code 2."""
    result = CliRunner().invoke(app, [str(arg) for arg in args])
    if result.exit_code == 2:
        _said.append(result.stderr)
    return result


def forget() -> None:
    """Forget what was said so far, by tests that do not compare it."""
    _said.clear()


def check(name: str, root: Path) -> None:
    """Compare what was refused with the file. `root` is the test's directory, which is called ROOT there."""
    said = list(dict.fromkeys(_plain(text, root).rstrip("\n") for text in _said))
    forget()
    if not said:
        return  # the case is about what is allowed, or about a run
    kept = sections()
    if os.environ.get(REMAKE):
        FILE.write_text(_text(kept | {name: "\n\n".join(said)}), encoding="utf-8")
        return
    found = kept.get(name, "")
    assert "\n\n".join(said) == found, (
        f"the messages of {name!r} are new: `python -m tests.make_messages`, and read the diff"
    )


def sections() -> dict[str, str]:
    """Name -> messages, in the order of the file."""
    if not FILE.exists():
        return {}
    parts = _HEADING.split(FILE.read_text(encoding="utf-8"))[1:]
    return {name: text.rstrip("\n") for name, text in zip(parts[::2], parts[1::2], strict=True)}


def _text(kept: dict[str, str]) -> str:
    told = "What `opd` says when it refuses something; `python -m tests.make_messages` writes this file.\n\n"
    return told + "\n".join(f"## {name}\n\n{text}\n" for name, text in kept.items())


def _plain(text: str, root: Path) -> str:
    """The message without what differs from run to run and from machine to machine."""
    text = text.replace(str(root.resolve()), "ROOT").replace(str(root), "ROOT")
    text = re.sub(r"\S*/pytest-of-\w+/pytest-\d+/", "TEMPORARY/", text)
    text = re.sub(r"\b[0-9a-f]{64}\b", "BLAKE3", text)
    text = re.sub(
        r"about [\d.]+ GiB of memory for a machine with .*", "the parts of the sum, and the machine's memory", text
    )
    # A long list of names grows with every new one, which is no news about the message.
    return re.sub(r"([\w-]+)(?:, [\w-]+){4,}", r"\1, ...", text)
