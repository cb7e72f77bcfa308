"""Handlers (`walk.Handler`) of `git`, `npm` and `patch`, which do what files say that the episode may have written: aliases and
settings of git, scripts of a package, patches."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import suppress
from functools import partial

from opd.guard.facts import ProgramCall, Streams
from opd.guard.shell.branches import run_in_subprocess
from opd.guard.shell.fields import show_field
from opd.guard.shell.nodes import UnreadableCommand
from opd.guard.shell.walk import ProgramRun, Walker

_FILE = re.compile(r"^(?:\+\+\+ (?:b/)?|\*\*\* (?:Update|Add|Delete) File: )([^\t\n]+)", re.MULTILINE)
"""The line of a patch that names the next file, in the forms of `diff -u` and of OpenAI's `apply_patch`."""
_ALIAS = re.compile(r"^\s*(?:alias\.)?([\w-]+)\s*=\s*(.+)$", re.MULTILINE)
"""The line of an alias in a settings file of git: its name and what it stands for."""
_COMMAND_KEYS = ("core.pager", "core.editor", "core.fsmonitor", "core.sshcommand", "diff.external", "sequence.editor", "pager.")  # fmt: skip
"""Beginnings of settings of git, in lower case, whose values are commands that git runs by itself."""
_COMMAND_KEY_ENDS = (".textconv", ".clean", ".smudge", ".process", ".cmd")
"""Ends of such settings."""
_NAMED_SCRIPTS = {"test", "start", "install", "ci", "build", "stop", "restart", "pack", "publish"}
"""Scripts of a package that npm runs without `run`: `npm test`."""


def handle_git(walker: Walker, run: ProgramRun) -> str | None:
    """Walk `git`, with aliases and commands that the episode put into its settings, and with what a patch changes."""
    walker.note_call(run)
    call = walker.calls[-1]
    for index, arg in enumerate(map(show_field, run.argv[:-1])):
        if arg == "-c":
            _apply_setting(walker, *show_field(run.argv[index + 1]).partition("=")[::2])
    if call.git == "config" and len(call.args) > 1:
        _apply_setting(walker, call.args[-2], call.args[-1])
    elif call.git in ("apply", "am"):
        note_patches(walker, run, list(call.args))
    elif text := _read_aliases(walker).get(call.git):
        position = next(index for index, arg in enumerate(run.argv) if show_field(arg) == call.git)
        arguments = " ".join(map(show_field, run.argv[position + 1 :]))
        walker.walk_text(f"{text[1:]} {arguments}" if text.startswith("!") else f"git {text} {arguments}", run.streams)
    return None


def _apply_setting(walker: Walker, key: str, value: str) -> None:
    """Take note of a setting of git: keep an alias for later calls, and walk a command that git will run by itself."""
    if key.lower().startswith("alias."):
        walker.session.record_append(f"{walker.session.home}/.gitconfig", f"{key[6:]} = {value}\n")
    elif key.lower().startswith(_COMMAND_KEYS) or key.lower().endswith(_COMMAND_KEY_ENDS):
        with suppress(UnreadableCommand):
            run_in_subprocess(walker.session, partial(walker.walk_text, value))


def _read_aliases(walker: Walker) -> dict[str, str]:
    """Return alias of git -> what it stands for, from the settings files that the episode wrote."""
    aliases: dict[str, str] = {}
    for path in (f"{walker.session.home}/.gitconfig", ".git/config"):
        settings = walker.session.written_text_of(path) or ""
        aliases |= {name: value.strip('"') for name, value in _ALIAS.findall(settings)}
    return aliases


def handle_patch(walker: Walker, run: ProgramRun) -> str | None:
    """Walk `patch`, with what its patch files change."""
    walker.note_call(run)
    note_patches(walker, run, [show_field(arg) for arg in run.argv[1:] if not arg.startswith("-")])
    return None


def note_patches(walker: Walker, run: ProgramRun, files: list[str]) -> None:
    """Note a call for each file that these patch files change, or, without any, the patch on the standard input. A patch whose text is
    not known is passed over."""
    texts = [walker.session.written_text_of(file) for file in files] or [run.streams.stdin]
    for call in (call for text in texts if text for call in read_patch(walker, text)):
        walker.add_call(call)


def read_patch(walker: Walker, text: str) -> Iterator[ProgramCall]:
    """Yield a call for each file that a patch changes. Its arguments are the lines that begin with `+` or `-`, and its text are the
    lines that are added."""
    heads = list(_FILE.finditer(text))
    for head, end in zip(heads, [*(next_head.start() for next_head in heads), len(text)][1:], strict=True):
        path = head[1].strip() if head[1].strip() != "/dev/null" else ""
        lines = tuple(line for line in text[head.end() : end].split("\n") if line[:1] in ("+", "-"))
        added = "\n".join(line[1:] for line in lines if line[0] == "+")
        writes = tuple(walker.session.resolve_argument(path, follow_copies=False)) if path else ()
        yield ProgramCall(program="patch", args=lines, argv=(path,), writes=writes, text=added)


def handle_npm(walker: Walker, run: ProgramRun) -> str | None:
    """Walk the script that package.json has under the NAME of `npm run NAME`, and those that npm runs before and after it, if the
    episode wrote that file."""
    walker.note_call(run)
    names = [show_field(arg) for arg in run.argv[1:] if not arg.startswith("-")]
    if names[:2] == ["pkg", "set"] or not names:
        return None
    name = names[1] if names[0] in ("run", "run-script") and len(names) > 1 else names[0]
    if name == names[0] and names[0] not in _NAMED_SCRIPTS and show_field(run.argv[0]) == "npm":
        return None  # `yarn NAME` and `pnpm NAME` run any script
    with suppress(ValueError, AttributeError):
        scripts = json.loads(walker.session.written_text_of("package.json") or "{}").get("scripts", {})
        for text in (scripts.get(f"{when}{name}") for when in ("pre", "", "post")):
            if isinstance(text, str):
                run_in_subprocess(walker.session, partial(walker.walk_text, text, Streams()))
    return None
