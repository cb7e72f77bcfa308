"""Programs that run the program which their arguments name."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from opd.guard.facts import Streams
from opd.guard.shell.fields import ACTIVE, STAR, UNKNOWN, plain
from opd.guard.shell.nodes import Unreadable
from opd.guard.shell.walk import Run, Walker

MAX_FOUND = 1024
"""Roots of a `find` times patterns of names."""


@dataclass(frozen=True, slots=True)
class Wrapper:
    """How a program that runs its arguments names them."""

    valued: frozenset[str] = frozenset()
    """Options with a value."""
    operands: int = 0
    """Operands before the command, such as the time of `timeout`."""
    assignments: bool = False
    """True if `NAME=value` may stand before the command."""


def _wrapper(valued: str = "", operands: int = 0, assignments: bool = False) -> Wrapper:
    return Wrapper(frozenset(valued.split()), operands, assignments)


WRAPPERS = {
    "sudo": _wrapper(
        "-u -g -C -h -p -U -D -R -T -r -t --user --group --close-from --host --prompt --other-user --chdir --chroot "
        "--command-timeout --role --type",
        assignments=True,
    ),
    "doas": _wrapper("-u -C"),
    "env": _wrapper("-u -C --unset --chdir", assignments=True),
    "nice": _wrapper("-n --adjustment"),
    "ionice": _wrapper("-c -n --class --classdata"),
    "timeout": _wrapper("-k -s --kill-after --signal", 1),
    "nohup": _wrapper(),
    "time": _wrapper("-f -o --format --output"),
    "stdbuf": _wrapper("-i -o -e --input --output --error"),
    "setsid": _wrapper(),
    "command": _wrapper(),
    "builtin": _wrapper(),
    "exec": _wrapper("-a"),
    "busybox": _wrapper(),
    "toybox": _wrapper(),
    "chroot": _wrapper("--groups --userspec", 1),
    "unshare": _wrapper(),
    "strace": _wrapper("-e -o -p -s"),
    "ltrace": _wrapper("-e -o -p -s"),
    "watch": _wrapper("-n --interval"),
    "flock": _wrapper("-w -E --timeout --wait --conflict-exit-code", 1),
    "ssh": _wrapper("-o -p -i -l -F -J", 1),
}


_UV = _wrapper(
    "-p --with --with-requirements --python --extra --group --package --project --directory --env-file --index-url"
)
_DOCKER = _wrapper(
    "-v -w -e -u -p -h -l -m --name --network --volume --env --env-file --user --workdir --publish --mount --entrypoint "
    "--hostname --label --memory --cpus --gpus --platform",
    1,
)
AS_TEXT = {"env": ("-S", "--split-string"), "flock": ("-c", "--command")}
"""Options behind which the command is one argument, a text that is taken apart."""


def wrapped(walker: Walker, run: Run) -> str | None:
    name = plain(run.argv[0]).rpartition("/")[2]
    wrapper = WRAPPERS[name]
    run = run.but(_apart(run.argv, wrapper, AS_TEXT.get(name, ())))
    inner, tags = inner_command(run.argv[1:], wrapper)
    outer = run.argv[: len(run.argv) - len(inner)]
    if name not in ("exec", "command", "builtin", "busybox", "toybox", "nohup") or not inner:
        walker.note(run.but(outer if inner else run.argv))
        if inner:
            walker.tag("wraps")
    if not inner:
        walker.session.written.update(dict.fromkeys(run.streams.truncates))
        return None
    if name == "ssh" or plain(outer[-1]) in AS_TEXT.get(name, ()):
        return walker.text(" ".join(plain(a) for a in inner), run.streams)
    return walker.run(Run(inner, run.streams, run.tags | tags))


def _apart(argv: list[str], wrapper: Wrapper, options: tuple[str, ...]) -> list[str]:
    """The arguments with a text that is joined to one of these options as an argument of its own: `env -S'ls -l'`."""
    index = 1
    while index < len(argv) and ((arg := plain(argv[index])).startswith("-") or "=" in arg):
        for option in options:
            joined = f"{option}=" if option.startswith("--") else option
            if arg.startswith(joined) and len(arg) > len(joined):
                return [*argv[:index], option, argv[index][len(joined) :], *argv[index + 1 :]]
        index += 2 if _value_follows(arg, wrapper.valued) else 1
    return argv


def inner_command(argv: list[str], wrapper: Wrapper) -> tuple[list[str], frozenset[str]]:
    """The command inside of a wrapper's arguments, and tags of what is set for it."""
    index, operands, options = 0, wrapper.operands, True
    tags: set[str] = set()
    while index < len(argv):
        arg = plain(argv[index])
        if options and arg.startswith("-") and arg != "-":
            options = arg != "--"
            index += 2 if _value_follows(arg, wrapper.valued) else 1
        elif wrapper.assignments and re.match(r"[A-Za-z_]\w*=", arg):
            tags.add(f"sets:{arg.partition('=')[0]}")
            index += 1
        elif operands:
            operands -= 1
            index += 1
        else:
            break
    return argv[index:], frozenset(tags)


def _value_follows(arg: str, valued: frozenset[str]) -> bool:
    """Whether the value of an option is the next argument. A long option may be cut short, short ones may stand together."""
    if arg.startswith("--"):
        return arg != "--" and any(name.startswith(arg) for name in valued)
    taken = (index for index, letter in enumerate(arg) if index and f"-{letter}" in valued)
    return next(taken, 0) == len(arg) - 1 > 0


def xargs(walker: Walker, run: Run) -> str | None:
    inner, _ = inner_command(run.argv[1:], _wrapper("-I -n -L -P -d -s -a -E --max-args --delimiter --max-procs"))
    mark = option(run.argv, "-I")
    items = run.streams.stdin.split() if run.streams.stdin is not None else [UNKNOWN]
    walker.note(run.but(run.argv[:1]))
    if not inner:
        return None
    given = Streams(sources=run.streams.sources)
    if mark:
        for item in items[:16]:
            walker.run(Run([arg.replace(mark, item) for arg in inner], given, run.tags))
        return None
    return walker.run(Run([*inner, *items[:64]], given, run.tags))


def option(argv: list[str], name: str) -> str:
    """The value of a short option, written apart or joined."""
    for index, arg in enumerate(argv):
        if plain(arg) == name and index + 1 < len(argv):
            return plain(argv[index + 1])
        if arg.startswith(name) and len(arg) > len(name):
            return plain(arg)[len(name) :]
    return ""


def parallel(walker: Walker, run: Run) -> str | None:
    walker.note(run.but(run.argv[:1]))
    if ":::" not in run.argv:
        return None
    place = run.argv.index(":::")
    inner, _ = inner_command(run.argv[1:place], _wrapper("-j -I"))
    for item in run.argv[place + 1 : place + 17]:
        called = [arg.replace("{}", item) for arg in inner]
        walker.run(Run(called if called != inner else [*inner, item], Streams(), run.tags))
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
                walker.run(
                    Run(
                        [one.replace("{}", target) for one in inner],
                        Streams(),
                        run.tags,
                    )
                )
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
    roots = _roots(argv)
    if len(roots) * len(names) > MAX_FOUND:
        raise Unreadable("too much to find")
    flat = "-maxdepth" in argv and argv[argv.index("-maxdepth") + 1 :][:1] == ["1"]
    middle = "" if flat else STAR + STAR + "/"
    return [
        f"{root.rstrip('/')}/{middle}{name.translate(ACTIVE)}" if name != "." else root
        for root in roots
        for name in names or ["*"]
    ]


def script(walker: Walker, run: Run) -> str | None:
    """`script -c` and `su -c`: the command is one argument."""
    walker.note(run)
    for index, arg in enumerate(run.argv[1:-1], 1):
        if arg.startswith("-") and arg.endswith("c"):
            walker.text(plain(run.argv[index + 1]), run.streams)
    return None


def runner(walker: Walker, run: Run) -> str | None:
    """`uv run`, `poetry run`, `pipenv run`."""
    if run.argv[1:2] != ["run"]:
        walker.note(run)
        return None
    inner, _ = inner_command(run.argv[2:], _UV)
    return walker.run(run.but(inner)) if inner else None


def docker(walker: Walker, run: Run) -> str | None:
    """`docker exec CONTAINER command` and `docker run IMAGE command`."""
    walker.note(run)
    place = next((i for i, arg in enumerate(run.argv) if plain(arg) in ("exec", "run")), 0)
    if place:
        inner, _ = inner_command(run.argv[place + 1 :], _DOCKER)
        if inner:
            walker.run(run.but(inner))
    return None
