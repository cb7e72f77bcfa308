"""Handlers (`walk.Handler`) of programs that set variables of the shell from their arguments or from their standard input."""

from __future__ import annotations

import re

from opd.guard.shell.arrays import assign_variable, join_items
from opd.guard.shell.fields import UNKNOWN, is_fully_known, show_field
from opd.guard.shell.nodes import Assignment
from opd.guard.shell.outputs import predict_output
from opd.guard.shell.walk import ProgramRun, Walker
from opd.guard.shell.wrappers import parse_option

MAX_ITEMS = 256
"""The most items of an array that is read; further ones are left out."""


def handle_declare(walker: Walker, run: ProgramRun) -> str | None:
    """Walk `export NAME=value`, `declare`, `local` and the like; the call gets tags such as `sets:NAME`."""
    walker.note_call(run)
    for arg in run.argv[1:]:
        name, equals, value = arg.partition("=")
        if equals and not arg.startswith("-"):
            walker.session.variables[show_field(name)] = value
            walker.tag_last_call(f"sets:{show_field(name)}")
            walker.tag_last_call(f"sets:{show_field(arg)}")
    return ""


def handle_unset(walker: Walker, run: ProgramRun) -> str | None:
    """Walk `unset NAME ...`, which drops variables and functions."""
    walker.note_call(run)
    for arg in run.argv[1:]:
        walker.session.variables.pop(show_field(arg), None)
        walker.session.functions.pop(show_field(arg), None)
    return ""


def handle_read(walker: Walker, run: ProgramRun) -> str | None:
    """Walk `read NAME ...`: each name gets a word of the first line, the last name the rest of it. With `-a` all words are one array."""
    walker.note_call(run)
    names, options = _parse_names(run.argv, "adinNptu")
    names = [options["a"]] if "a" in options else names or ["REPLY"]
    text = run.streams.stdin
    if text is None or not is_fully_known(text):
        walker.session.variables.update(dict.fromkeys(names, UNKNOWN))
        return ""
    line = text.partition("\n")[0]
    separators = walker.session.variables.get("IFS", " \t\n")
    words = _split_words(line, separators, -1 if "a" in options else len(names) - 1)
    if "a" in options:
        words = [join_items(words[:MAX_ITEMS])]
    walker.session.variables.update(zip(names, [*words, *[""] * len(names)], strict=False))
    return ""


def _split_words(line: str, separators: str, max_splits: int) -> list[str]:
    """Return the words of a line, split at most `max_splits` times; -1: as often as possible, 0: not at all. Separators other than
    white space count one by one."""
    if separators and not separators.strip():
        return line.split(maxsplit=max_splits) if max_splits else [line.strip()]
    if not separators or not max_splits:
        return [line]
    return re.split(f"[{re.escape(separators)}]", line, maxsplit=max(max_splits, 0))


def handle_mapfile(walker: Walker, run: ProgramRun) -> str | None:
    """Walk `mapfile NAME`, by which the lines of the standard input become an array."""
    walker.note_call(run)
    names, _ = _parse_names(run.argv, "dnOsuCc")
    text = run.streams.stdin
    lines = [UNKNOWN] if text is None else text.removesuffix("\n").split("\n")[:MAX_ITEMS]
    walker.session.variables[names[0] if names else "MAPFILE"] = join_items(lines)
    return ""


def _parse_names(argv: list[str], letters_with_value: str) -> tuple[list[str], dict[str, str]]:
    """Return the arguments that are no options, and option letter -> value for those options whose letters are in `letters_with_value`, the ones
    that take a value."""
    names: list[str] = []
    values: dict[str, str] = {}
    arguments = iter(map(show_field, argv[1:]))
    for arg in arguments:
        if not arg.startswith("-"):
            names.append(arg)
            continue
        name, joined = parse_option(arg, [f"-{letter}" for letter in letters_with_value])
        if name:
            values[name[1:]] = next(arguments, "") if joined is None else joined
    return names, values


def handle_printf(walker: Walker, run: ProgramRun) -> str | None:
    """Walk `printf`; with `-v NAME` it sets that variable to what it would print."""
    walker.note_call(run)
    option = show_field(run.argv[1]) if len(run.argv) > 1 else ""
    if not option.startswith("-v"):
        return predict_output(run.argv, run.streams.stdin, walker.session)
    name, *arguments = (
        [option[2:], *run.argv[2:]] if option[2:] else [*map(show_field, run.argv[2:3]), *run.argv[3:]] or [""]
    )
    output = predict_output([run.argv[0], *arguments], run.streams.stdin, walker.session)
    assign_variable(walker.session.variables, Assignment(name, ()), UNKNOWN if output is None else output)
    return ""
