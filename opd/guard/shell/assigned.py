"""Programs that set variables of the shell from their arguments or from their standard input."""

from __future__ import annotations

import re

from opd.guard.shell.arrays import array, assign
from opd.guard.shell.fields import UNKNOWN, known, plain
from opd.guard.shell.nodes import Assignment
from opd.guard.shell.outputs import output
from opd.guard.shell.walk import Run, Walker
from opd.guard.shell.wrappers import option

MAX_ITEMS = 256


def declare(walker: Walker, run: Run) -> str | None:
    """`export NAME=value` and the like."""
    walker.note(run)
    for arg in run.argv[1:]:
        name, equals, value = arg.partition("=")
        if equals and not arg.startswith("-"):
            walker.session.variables[plain(name)] = value
            walker.tag(f"sets:{plain(name)}")
            walker.tag(f"sets:{plain(arg)}")
    return ""


def unset(walker: Walker, run: Run) -> str | None:
    """Variables and functions are gone."""
    walker.note(run)
    for arg in run.argv[1:]:
        walker.session.variables.pop(plain(arg), None)
        walker.session.functions.pop(plain(arg), None)
    return ""


def read(walker: Walker, run: Run) -> str | None:
    """`read NAME ...`: the words of a line, the last name gets the rest; with `-a` all are one array."""
    walker.note(run)
    names, options = _names(run.argv, "adinNptu")
    names = [options["a"]] if "a" in options else names or ["REPLY"]
    text = run.streams.stdin
    if text is None or not known(text):
        walker.session.variables.update(dict.fromkeys(names, UNKNOWN))
        return ""
    line = text.partition("\n")[0]
    separators = walker.session.variables.get("IFS", " \t\n")
    words = _split(line, separators, -1 if "a" in options else len(names) - 1)
    if "a" in options:
        words = [array(words[:MAX_ITEMS])]
    walker.session.variables.update(zip(names, [*words, *[""] * len(names)], strict=False))
    return ""


def _split(line: str, separators: str, most: int) -> list[str]:
    """The words of a line; `most` is how often it is split."""
    if separators.strip() or not separators:
        return re.split(f"[{re.escape(separators)}]", line, maxsplit=max(most, 0)) if separators and most else [line]
    return line.split(maxsplit=most) if most else [line.strip()]


def mapfile(walker: Walker, run: Run) -> str | None:
    """`mapfile NAME`: the lines become an array."""
    walker.note(run)
    names, _ = _names(run.argv, "dnOsuCc")
    text = run.streams.stdin
    lines = [UNKNOWN] if text is None else text.removesuffix("\n").split("\n")[:MAX_ITEMS]
    walker.session.variables[names[0] if names else "MAPFILE"] = array(lines)
    return ""


def _names(argv: list[str], valued: str) -> tuple[list[str], dict[str, str]]:
    """The names behind the options, and the values of these options by their letters."""
    names: list[str] = []
    values: dict[str, str] = {}
    rest = iter(map(plain, argv[1:]))
    for arg in rest:
        name, joined = option(arg, {f"-{letter}" for letter in valued}) if arg.startswith("-") else ("", None)
        if name:
            values[name[1:]] = next(rest, "") if joined is None else joined
        elif not arg.startswith("-"):
            names.append(arg)
    return names, values


def printf(walker: Walker, run: Run) -> str | None:
    """`printf -v NAME ...` sets a variable to what it would print."""
    walker.note(run)
    first = plain(run.argv[1]) if len(run.argv) > 1 else ""
    if not first.startswith("-v"):
        return output(run.argv, run.streams.stdin, walker.session)
    name, *rest = [first[2:], *run.argv[2:]] if first[2:] else [*map(plain, run.argv[2:3]), *run.argv[3:]] or [""]
    said = output([run.argv[0], *rest], run.streams.stdin, walker.session)
    assign(walker.session.variables, Assignment(name, ()), UNKNOWN if said is None else said)
    return ""
