"""Programs that run a command for each of many items: `xargs`, `parallel`, `find -exec`."""

from __future__ import annotations

from dataclasses import replace

from opd.guard.facts import Streams
from opd.guard.shell.fields import ACTIVE, STAR, UNKNOWN, plain
from opd.guard.shell.nodes import Unreadable
from opd.guard.shell.walk import Run, Walker
from opd.guard.shell.wrappers import inner_command, option, takes

MAX_FOUND = 1024
"""Roots of a `find` times patterns of names."""
MAX_ONE_BY_ONE = 16
"""Items that a command is gone through for one by one."""
MAX_AT_ONCE = 64
"""Items that it is given at once."""
_XARGS = takes("-I -n -L -P -d -s -a -E --max-args --delimiter --max-procs --arg-file --replace")
_PARALLEL = takes("-j -I -a --jobs --arg-file --colsep -C -N -n")


def xargs(walker: Walker, run: Run) -> str | None:
    inner, _ = inner_command(run.argv[1:], _XARGS)
    options = run.argv[: len(run.argv) - len(inner)]
    mark = option(options, "-I")
    file = option(options, "-a") or option(options, "--arg-file")
    text = walker.session.script_at(file) if file else run.streams.stdin
    items = text.split() if text is not None else [UNKNOWN]
    walker.note(run.but([run.argv[0], file] if file else run.argv[:1]))
    if not inner:
        return None
    given = Streams(sources=run.streams.sources)
    if mark:
        for item in items[:MAX_ONE_BY_ONE]:
            walker.program(Run([arg.replace(mark, item) for arg in inner], given, run.tags))
        return None
    return walker.program(Run([*inner, *items[:MAX_AT_ONCE]], given, run.tags))


def parallel(walker: Walker, run: Run) -> str | None:
    marks = [index for index, arg in enumerate(run.argv) if arg.startswith(":::")] or [len(run.argv)]
    inner, _ = inner_command(run.argv[1 : marks[0]], _PARALLEL)
    options = run.argv[: marks[0] - len(inner)]
    files = [option(options, "-a") or option(options, "--arg-file")]
    given: list[str] = []
    for start, end in zip(marks, [*marks[1:], len(run.argv)], strict=True):
        follows = run.argv[start + 1 : end]
        if run.argv[start : start + 1] and run.argv[start].startswith("::::"):
            files += follows
        else:
            given += follows
    files = [file for file in files if file]
    walker.note(run.but([run.argv[0], *files]))
    texts = [walker.session.script_at(file) for file in files] or ([] if given else [run.streams.stdin])
    items = given + [item for text in texts for item in ([UNKNOWN] if text is None else text.split("\n")) if item]
    for item in items[:MAX_ONE_BY_ONE] if inner else ():
        called = [arg.replace("{}", item) for arg in inner]
        walker.program(Run(called if called != inner else [*inner, item], Streams(), run.tags))
    return None


def find(walker: Walker, run: Run) -> str | None:
    argv = [plain(arg) for arg in run.argv]
    found = _found(argv)
    walker.note(run)
    call = walker.calls[-1]
    roots = [walker.session.absolute(root) for root in _roots(argv)]
    outward = any(root in ("/", "/home", "/root", "/opt", "/srv", "/mnt", "/var", "/usr", "/tmp") for root in roots)
    call = replace(call, tags=call.tags | ({"outward"} if outward else set()))
    deletes = tuple(p for one in found for p in walker.session.paths(one)) if "-delete" in argv else ()
    walker.calls[-1] = replace(call, writes=(*call.writes, *deletes))
    for index, arg in enumerate(argv):
        if arg in ("-exec", "-execdir", "-ok", "-okdir"):
            inner = []
            for one in run.argv[index + 1 :]:
                if plain(one) in (";", "+"):
                    break
                inner.append(one)
            for target in found if inner else ():
                walker.program(Run([one.replace("{}", target) for one in inner], Streams(), run.tags))
    return None


def _roots(argv: list[str]) -> list[str]:
    roots = []
    for arg in argv[1:]:
        if arg.startswith(("-", "(", "!")):
            break
        roots.append(arg)
    return roots or ["."]


def _found(argv: list[str]) -> list[str]:
    """Globs of what a find may find: its roots with the patterns of its names. Raises: Unreadable if they are too many."""
    names = [argv[i + 1] for i, arg in enumerate(argv[:-1]) if arg in ("-name", "-iname")]
    paths = [argv[i + 1] for i, arg in enumerate(argv[:-1]) if arg in ("-path", "-ipath", "-wholename", "-iwholename")]
    roots = _roots(argv)
    if len(roots) * (len(names) + len(paths)) > MAX_FOUND:
        raise Unreadable("too much to find")
    flat = "-maxdepth" in argv and argv[argv.index("-maxdepth") + 1 :][:1] == ["1"]
    middle = "" if flat else STAR + STAR + "/"
    whole = [path.translate(ACTIVE) for path in paths if path.startswith(("/", "."))]
    names += [path.lstrip("*/") for path in paths if not path.startswith(("/", "."))]
    return whole + [
        f"{root.rstrip('/')}/{middle}{name.translate(ACTIVE)}" if name != "." else root
        for root in roots
        for name in names or ([] if whole else ["*"])
    ]
