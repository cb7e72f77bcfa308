"""Handlers (`walk.Handler`) of programs that change the directory, the positional arguments, or files."""

from __future__ import annotations

import posixpath

from opd.guard.session import MAX_PATH
from opd.guard.shell.fields import UNKNOWN, UNSET, is_fully_known, show_field
from opd.guard.shell.walk import ProgramRun, Walker


def handle_cd(walker: Walker, run: ProgramRun) -> str | None:
    """Walk `cd`, `pushd` or `popd`, which we take to succeed. A directory that is not known becomes an unknown one below the present
    one."""
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
    """Walk `tee`, which writes its standard input to files and prints it."""
    walker.note_call(run)
    text = run.streams.stdin
    options = [show_field(arg) for arg in run.argv[1:] if arg.startswith("-")]
    appends = any(arg == "--append" or (arg[1:2] != "-" and "a" in arg) for arg in options)
    for arg in run.argv[1:]:
        if not arg.startswith("-") and is_fully_known(arg):
            path = walker.session.resolve_path(arg, follow_copies=False)
            (walker.session.record_append if appends else walker.session.record_write)(path, text)
    return text


def handle_set(walker: Walker, run: ProgramRun) -> str | None:
    """Walk `set -- ARGUMENT ...`, which sets the positional arguments."""
    walker.note_call(run)
    if "--" in run.argv:
        walker.session.positional = run.argv[run.argv.index("--") + 1 :]
    return ""


def handle_shift(walker: Walker, run: ProgramRun) -> str | None:
    """Walk `shift N`, which drops the first N positional arguments; without N, one."""
    walker.note_call(run)
    count = show_field(run.argv[1]) if len(run.argv) > 1 else "1"
    walker.session.positional = walker.session.positional[int(count) if count.isdecimal() else 1 :]
    return ""


def handle_copy(walker: Walker, run: ProgramRun) -> str | None:
    """Walk `cp`, `mv` or `ln`: the session then knows the new name as a copy of the old one, or as a link to it, with its text if the
    episode wrote that."""
    walker.note_call(run)
    session = walker.session
    operands = [arg for arg in run.argv[1:] if not arg.startswith("-")]
    is_ln = show_field(run.argv[0]).endswith("ln")
    if len(operands) == 1 and is_ln:  # `ln /a/b` makes a link `b` here
        operands.append(posixpath.basename(operands[0]))
    if len(operands) < 2:
        return ""
    destination = posixpath.normpath(posixpath.join(session.cwd, show_field(operands[-1])))
    symbolic = is_ln and any("s" in arg for arg in run.argv[1:] if arg.startswith("-"))
    for operand in operands[:-1]:
        # The target of a symbolic link counts from the directory of the link, that of anything else from the working directory.
        source = posixpath.normpath(show_field(operand)) if symbolic else session.resolve_path(operand)
        base = posixpath.dirname(destination) if symbolic else session.cwd
        source = session.resolve_path(posixpath.join(base, source))
        text = session.written.get(source)
        # The destination may be a directory or a file: nobody knows, so both names count.
        for name in {destination, posixpath.join(destination, posixpath.basename(show_field(operand)))}:
            if name != source:
                session.written.pop(name, None)
                session.appended.pop(name, None)
                (session.links if symbolic else session.copies)[name] = source
                if text is not None:
                    session.record_write(name, text)
    return ""
