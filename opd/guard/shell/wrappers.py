"""Programs that run the program which their arguments name."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from opd.guard.session import Session
from opd.guard.shell.fields import plain
from opd.guard.shell.walk import Run, Walker
from opd.guard.shell.ways import apart


@dataclass(frozen=True, slots=True)
class Wrapper:
    """How a program that runs its arguments names them."""

    valued: frozenset[str] = frozenset()
    """Options with a value."""
    operands: int = 0
    """Operands before the command, such as the time of `timeout`."""
    assignments: bool = False
    """True if `NAME=value` may stand before the command."""
    chdir: tuple[str, ...] = ()
    """Options whose value is the directory in which the command runs."""


def takes(valued: str = "", operands: int = 0, assignments: bool = False, chdir: tuple[str, ...] = ()) -> Wrapper:
    return Wrapper(frozenset(valued.split()), operands, assignments, chdir)


WRAPPERS = {
    "sudo": takes(
        "-u -g -C -h -p -U -D -R -T -r -t --user --group --close-from --host --prompt --other-user --chdir --chroot "
        "--command-timeout --role --type",
        assignments=True,
        chdir=("-D", "--chdir"),
    ),
    "doas": takes("-u -C"),
    "env": takes("-u -C --unset --chdir", assignments=True, chdir=("-C", "--chdir")),
    "nice": takes("-n --adjustment"),
    "ionice": takes("-c -n --class --classdata"),
    "timeout": takes("-k -s --kill-after --signal", 1),
    "nohup": takes(),
    "time": takes("-f -o --format --output"),
    "stdbuf": takes("-i -o -e --input --output --error"),
    "setsid": takes(),
    "command": takes(),
    "builtin": takes(),
    "exec": takes("-a"),
    "busybox": takes(),
    "toybox": takes(),
    "chroot": takes("--groups --userspec", 1),
    "unshare": takes(),
    "strace": takes("-e -o -p -s"),
    "ltrace": takes("-e -o -p -s"),
    "watch": takes("-n --interval"),
    "flock": takes("-w -E --timeout --wait --conflict-exit-code", 1),
    "ssh": takes("-o -p -i -l -F -J", 1),
}


_UV = takes(
    "-p --with --with-requirements --python --extra --group --package --project --directory --env-file --index-url"
)
_DOCKER = takes(
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
    place = outer[-1] if name == "chroot" else next(filter(None, (option(outer, one) for one in wrapper.chdir)), "")
    if name == "ssh" or plain(outer[-1]) in AS_TEXT.get(name, ()):
        text = " ".join(plain(a) for a in inner)
        return _inside(walker.session, place, partial(walker.text, text, run.streams))
    goes_on = partial(walker.program, Run(inner, run.streams, run.tags | tags))
    return _inside(walker.session, place, goes_on) if place else goes_on()


def _inside(session: Session, place: str, act: Callable[[], str | None]) -> str | None:
    """Do this in a process of its own that begins in this directory."""

    def moved() -> str | None:
        session.cwd = session.absolute(place)
        return act()

    return apart(session, moved)


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


def option(argv: list[str], name: str) -> str:
    """The value of an option, written apart or joined."""
    for index, arg in enumerate(argv):
        if plain(arg) == name and index + 1 < len(argv):
            return plain(argv[index + 1])
        joined = f"{name}=" if name.startswith("--") else name
        if arg.startswith(joined) and len(arg) > len(joined):
            return plain(arg)[len(joined) :]
    return ""


def script(walker: Walker, run: Run) -> str | None:
    """`script -c` and `su -c`: the command is one argument."""
    walker.note(run)
    for index, arg in enumerate(run.argv[1:-1], 1):
        if arg.startswith("-") and arg.endswith("c"):
            apart(walker.session, partial(walker.text, plain(run.argv[index + 1]), run.streams))
    return None


def runner(walker: Walker, run: Run) -> str | None:
    """`uv run`, `poetry run`, `pipenv run`."""
    if run.argv[1:2] != ["run"]:
        walker.note(run)
        return None
    inner, _ = inner_command(run.argv[2:], _UV)
    return walker.program(run.but(inner)) if inner else None


def docker(walker: Walker, run: Run) -> str | None:
    """`docker exec CONTAINER command` and `docker run IMAGE command`."""
    walker.note(run)
    place = next((i for i, arg in enumerate(run.argv) if plain(arg) in ("exec", "run")), 0)
    if place:
        inner, _ = inner_command(run.argv[place + 1 :], _DOCKER)
        if inner:
            walker.program(run.but(inner))
    return None
