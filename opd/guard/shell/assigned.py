"""Programs that set variables of the shell from their arguments or from their standard input."""

from __future__ import annotations

from opd.guard.shell.arrays import array
from opd.guard.shell.fields import UNKNOWN, known, plain
from opd.guard.shell.outputs import output
from opd.guard.shell.walk import Run, Walker

_READ_VALUED = frozenset({"-d", "-i", "-n", "-N", "-p", "-t", "-u"})
_MAPFILE_VALUED = frozenset({"-d", "-n", "-O", "-s", "-u", "-C", "-c"})
MAX_ITEMS = 256


def declare(walker: Walker, run: Run) -> str | None:
    """`export NAME=value` and the like."""
    walker.note(run)
    for arg in run.argv[1:]:
        name, equals, value = arg.partition("=")
        if equals and not arg.startswith("-"):
            walker.session.variables[plain(name)] = value
            walker.tag(f"sets:{plain(name)}")
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
    names = _names(run.argv, _READ_VALUED) or ["REPLY"]
    text = run.streams.stdin
    if text is None or not known(text):
        walker.session.variables.update(dict.fromkeys(names, UNKNOWN))
        return ""
    line = text.partition("\n")[0]
    if len(names) > 1:
        line = line.translate(dict.fromkeys(map(ord, walker.session.variables.get("IFS", "")), " "))
    words = line.split(maxsplit=len(names) - 1) if len(names) > 1 else [line.strip()]
    if any(arg.startswith("-") and "a" in arg for arg in run.argv[1:]):
        words = [array(line.split()[:MAX_ITEMS])]
    walker.session.variables.update(zip(names, [*words, *[""] * len(names)], strict=False))
    return ""


def mapfile(walker: Walker, run: Run) -> str | None:
    """`mapfile NAME`: the lines become an array."""
    walker.note(run)
    names = _names(run.argv, _MAPFILE_VALUED) or ["MAPFILE"]
    text = run.streams.stdin
    lines = [UNKNOWN] if text is None else text.removesuffix("\n").split("\n")[:MAX_ITEMS]
    walker.session.variables[names[0]] = array(lines)
    return ""


def _names(argv: list[str], valued: frozenset[str]) -> list[str]:
    names: list[str] = []
    rest = iter(map(plain, argv[1:]))
    for arg in rest:
        if arg in valued:
            next(rest, None)
        elif not arg.startswith("-"):
            names.append(arg)
    return names


def printf(walker: Walker, run: Run) -> str | None:
    """`printf -v NAME ...` sets a variable to what it would print."""
    walker.note(run)
    if [plain(arg) for arg in run.argv[1:2]] != ["-v"] or len(run.argv) < 4:
        return output(run.argv, run.streams.stdin, walker.session)
    said = output([run.argv[0], *run.argv[3:]], run.streams.stdin, walker.session)
    walker.session.variables[plain(run.argv[2])] = UNKNOWN if said is None else said
    return ""
