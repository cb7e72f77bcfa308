"""Handlers (`walk.Handler`) of programs that run a command for each of many items: `xargs`, `parallel`, `find -exec`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from opd.guard.facts import Streams
from opd.guard.shell.fields import STAR, TO_MARKS, UNKNOWN, is_fully_known, show_field
from opd.guard.shell.nodes import UnreadableCommand
from opd.guard.shell.walk import ProgramRun, Walker
from opd.guard.shell.wrappers import Wrapper, find_inner_command

MAX_FOUND = 1024
"""The most globs of a `find`, which are its roots times its patterns."""
MAX_ONE_BY_ONE = 16
"""The first items of a command that runs once for each: later ones count only if they may be paths."""
MAX_AT_ONCE = 64
"""The first items of a command that gets many at once, and the most later ones that may be paths."""
SYSTEM_ROOTS = ("/", "/home", "/root", "/opt", "/srv", "/mnt", "/var", "/usr", "/tmp")
"""Directories of which nobody needs to search the whole tree for a task; a `find` that begins there gets the tag `outward`."""
_XARGS = Wrapper("-I -n -L -P -d -s -a -E --max-args --delimiter --max-procs --arg-file --replace")
_PARALLEL = Wrapper("-j -I -a --jobs --arg-file --colsep -C -N -n")


def handle_xargs(walker: Walker, run: ProgramRun) -> str | None:
    """Walk `xargs`, for which items from the standard input or from `-a FILE` become arguments of a command."""
    inner = find_inner_command(run.argv[1:], _XARGS)
    mark = show_field(inner.values.get("-I", ""))
    file = inner.values.get("-a", inner.values.get("--arg-file", ""))
    text = walker.session.written_text_of(file) if file else run.streams.stdin
    items = text.split() if text is not None else [UNKNOWN]
    walker.note_call(run.with_argv([run.argv[0], file] if file else run.argv[:1]))
    if not inner.argv:
        return None
    streams = Streams(sources=run.streams.sources)
    one_by_one = mark or inner.values.keys() & {"-n", "-L", "--max-args"}
    if not one_by_one:
        return walker.walk_program(ProgramRun([*inner.argv, *choose_items(items, MAX_AT_ONCE)], streams, run.tags))
    for item in choose_items(items, MAX_ONE_BY_ONE):
        called = [arg.replace(mark, item) for arg in inner.argv] if mark else [*inner.argv, item]
        walker.walk_program(ProgramRun(called, streams, run.tags))
    return None


def choose_items(items: Sequence[str], limit: int) -> list[str]:
    """Return the first `limit` items, and up to `MAX_AT_ONCE` of the others that may be paths."""
    return [*items[:limit], *[item for item in items[limit:] if "/" in item or not is_fully_known(item)][:MAX_AT_ONCE]]


def handle_parallel(walker: Walker, run: ProgramRun) -> str | None:
    """Walk `parallel`. Its items stand behind `:::`, in the files behind `::::` or `-a`, or on the standard input; its command is a
    script, in which `{}` is the item."""
    marks = [index for index, arg in enumerate(run.argv) if arg.startswith(":::")] or [len(run.argv)]
    inner = find_inner_command(run.argv[1 : marks[0]], _PARALLEL)
    arguments: list[str] = []
    files = [inner.values[name] for name in ("-a", "--arg-file") if name in inner.values]
    for start, end in zip(marks, [*marks[1:], len(run.argv)], strict=True):
        (files if run.argv[start:][:1] == ["::::"] else arguments).extend(run.argv[start + 1 : end])
    walker.note_call(run.with_argv([run.argv[0], *files]))
    texts = [walker.session.written_text_of(file) for file in files] or ([] if arguments else [run.streams.stdin])
    items = arguments + [item for text in texts for item in ([UNKNOWN] if text is None else text.split("\n")) if item]
    command = " ".join(map(show_field, inner.argv))
    for item in choose_items(items, MAX_ONE_BY_ONE) if inner.argv else ():
        walker.walk_text(command.replace("{}", item) if "{}" in command else f"{command} {item}", Streams(), run.tags)
    return None


def handle_find(walker: Walker, run: ProgramRun) -> str | None:
    """Walk `find`: with `-delete` it writes what it may find, with `-exec` and its like it runs a command on that."""
    argv = [show_field(arg) for arg in run.argv]
    globs = _make_find_globs(argv)
    walker.note_call(run)
    call = walker.calls[-1]
    roots = [walker.session.resolve_path(root) for root in _find_roots(argv)]
    is_outward = any(root in SYSTEM_ROOTS for root in roots)
    call = replace(call, tags=call.tags | ({"outward"} if is_outward else set()))
    deletes = tuple(p for field in globs for p in walker.session.resolve_argument(field)) if "-delete" in argv else ()
    walker.calls[-1] = replace(call, writes=(*call.writes, *deletes))
    for index, arg in enumerate(argv):
        if arg in ("-exec", "-execdir", "-ok", "-okdir"):
            inner = []
            for field in run.argv[index + 1 :]:
                if show_field(field) in (";", "+"):
                    break
                inner.append(field)
            for target in globs if inner else ():
                walker.walk_program(ProgramRun([field.replace("{}", target) for field in inner], Streams(), run.tags))
    return None


def _find_roots(argv: list[str]) -> list[str]:
    """Return the arguments of a `find` before its first condition: the directories that it searches."""
    roots = []
    for arg in argv[1:]:
        if arg.startswith(("-", "(", "!")):
            break
        roots.append(arg)
    return roots or ["."]


def _make_find_globs(argv: list[str]) -> list[str]:
    """Return globs of what a `find` may find: each root with each pattern of names below it; also patterns of whole paths. Raises:
    UnreadableCommand if they are too many."""
    names = [argv[i + 1] for i, arg in enumerate(argv[:-1]) if arg in ("-name", "-iname")]
    paths = [] if names else _path_patterns(argv)
    roots = _find_roots(argv)
    if len(roots) * (len(names) + len(paths)) > MAX_FOUND:
        raise UnreadableCommand("too much to find")
    is_flat = "-maxdepth" in argv and argv[argv.index("-maxdepth") + 1 :][:1] == ["1"]
    middle = "" if is_flat else STAR + STAR + "/"
    path_globs = [path.translate(TO_MARKS) for path in paths if path.startswith(("/", "."))]
    names += [path.lstrip("*/") for path in paths if not path.startswith(("/", "."))]
    return path_globs + [
        f"{root.rstrip('/')}/{middle}{name.translate(TO_MARKS)}" if name != "." else root
        for root in roots
        for name in names or ([] if path_globs else ["*"])
    ]


def _path_patterns(argv: list[str]) -> list[str]:
    """Return the patterns of whole paths in the conditions of a `find`, without those of what it leaves out."""
    return [
        argv[i + 1]
        for i, arg in enumerate(argv[:-1])
        if arg in ("-path", "-ipath", "-wholename", "-iwholename")
        and argv[i - 1] not in ("!", "-not")
        and argv[i + 2 : i + 3] != ["-prune"]
    ]
