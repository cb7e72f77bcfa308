"""Programs that change what the shell or its files are afterwards."""

from __future__ import annotations

import posixpath

from opd.guard.session import MAX_PATH
from opd.guard.shell.fields import UNKNOWN, UNSET, is_fully_known, show_field
from opd.guard.shell.walk import ProgramRun, Walker


def handle_cd(walker: Walker, run: ProgramRun) -> str | None:
    """`cd`, `pushd`, `popd`, which are taken to succeed; `cd -` goes back."""
    session, program = walker.session, show_field(run.argv[0])
    operands = [arg for arg in run.argv[1:] if not arg.startswith("-") or arg == "-"]
    walker.note_call(run.with_argv([run.argv[0], *operands]))
    old_cwd = session.cwd
    target = (operands[0] if operands else session.home).replace(UNSET, "")
    if program == "popd" or (program == "pushd" and not operands):
        target = session.directory_stack.pop(0) if session.directory_stack else old_cwd
    elif target == "-":
        target = session.previous_cwd
    if program == "pushd":
        session.directory_stack.insert(0, old_cwd)
    path = session.resolve_path(target) if is_fully_known(target) and len(target) <= MAX_PATH else ""
    session.cwd = path if path and len(path) <= MAX_PATH else posixpath.join(old_cwd, UNKNOWN)
    session.previous_cwd = old_cwd
    return ""


def handle_tee(walker: Walker, run: ProgramRun) -> str | None:
    """Write the standard input to files, and pass it on."""
    walker.note_call(run)
    text = run.streams.stdin
    options = [show_field(arg) for arg in run.argv[1:] if arg.startswith("-")]
    adds = any(arg == "--append" or (arg[1:2] != "-" and "a" in arg) for arg in options)
    for arg in run.argv[1:]:
        if not arg.startswith("-") and is_fully_known(arg):
            path = walker.session.resolve_path(arg, follow_copies=False)
            (walker.session.record_append if adds else walker.session.record_write)(path, text)
    return text


def handle_set(walker: Walker, run: ProgramRun) -> str | None:
    walker.note_call(run)
    if "--" in run.argv:
        walker.session.positional = run.argv[run.argv.index("--") + 1 :]
    return ""


def handle_shift(walker: Walker, run: ProgramRun) -> str | None:
    """`shift N`: the first positional arguments are dropped."""
    walker.note_call(run)
    count = show_field(run.argv[1]) if len(run.argv) > 1 else "1"
    walker.session.positional = walker.session.positional[int(count) if count.isdecimal() else 1 :]
    return ""


def handle_copy(walker: Walker, run: ProgramRun) -> str | None:
    """`cp`, `mv`, `ln`: what is behind the new name is what was behind the old one."""
    walker.note_call(run)
    session = walker.session
    operands = [arg for arg in run.argv[1:] if not arg.startswith("-")]
    if len(operands) == 1 and show_field(run.argv[0]).endswith("ln"):
        operands.append(posixpath.basename(operands[0]))
    if len(operands) < 2:
        return ""
    destination = posixpath.normpath(posixpath.join(session.cwd, show_field(operands[-1])))
    symbolic = show_field(run.argv[0]).endswith("ln") and any("s" in arg for arg in run.argv[1:] if arg.startswith("-"))
    for operand in operands[:-1]:
        source = posixpath.normpath(show_field(operand)) if symbolic else session.resolve_path(operand)
        base = posixpath.dirname(destination) if symbolic else session.cwd
        source = session.resolve_path(posixpath.join(base, source))
        text = session.written.get(source)
        for name in {destination, posixpath.join(destination, posixpath.basename(show_field(operand)))}:
            if name != source:
                session.written.pop(name, None)
                session.appended.pop(name, None)
                (session.links if symbolic else session.copies)[name] = source
                if text is not None:
                    session.record_write(name, text)
    return ""
