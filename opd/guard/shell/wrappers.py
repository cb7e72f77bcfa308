"""Programs that run the program which their arguments name."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from itertools import pairwise

from opd.guard.shell.fields import known, plain
from opd.guard.shell.walk import Run, Walker


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
    **dict.fromkeys(
        ("fakeroot", "unbuffer", "xvfb-run", "linux64", "systemd-run", "rlwrap", "valgrind", "catchsegv", "prlimit"),
        takes(),
    ),
    **dict.fromkeys(("setarch", "chrt"), takes(operands=1)),
    "command": takes(),
    "builtin": takes(),
    "exec": takes("-a"),
    "busybox": takes(),
    "toybox": takes(),
    "chroot": takes("--groups --userspec", 1),
    "unshare": takes("-w -S -G -R --wd --setuid --setgid --root", chdir=("-w", "--wd")),
    "nsenter": takes("-t -S -G --target --setuid --setgid --wd", chdir=("--wd",)),
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
    taken = inner_command(run.argv[1:], wrapper)
    inner = taken.argv
    outer = run.argv[: len(run.argv) - len(inner)]
    if name not in ("exec", "command", "builtin", "busybox", "toybox", "nohup") or not inner:
        walker.note(run.but(outer if inner else run.argv))
        if inner:
            walker.tag("wraps")
    if not inner:
        walker.session.written.update(dict.fromkeys(run.streams.truncates))
        return None
    place = (
        outer[-1] if name == "chroot" else next((taken.values[one] for one in wrapper.chdir if one in taken.values), "")
    )
    if place:  # each of these is a process of its own, so that this ends with it
        walker.session.cwd = walker.session.absolute(place)
    if name == "ssh" or plain(outer[-1]) in AS_TEXT.get(name, ()):
        return walker.text(" ".join(plain(a) for a in inner), run.streams)
    return walker.program(Run(inner, run.streams, run.tags | taken.tags))


def _apart(argv: list[str], wrapper: Wrapper, options: tuple[str, ...]) -> list[str]:
    """The arguments with a text that is joined to one of these options as an argument of its own: `env -S'ls -l'`."""
    index = 1
    while index < len(argv) and ((arg := plain(argv[index])).startswith("-") or "=" in arg):
        for one in options:
            joined = f"{one}=" if one.startswith("--") else one
            if arg.startswith(joined) and len(arg) > len(joined):
                return [*argv[:index], one, argv[index][len(joined) :], *argv[index + 1 :]]
        name, value = option(arg, wrapper.valued)
        index += 2 if name and value is None else 1
    return argv


@dataclass(frozen=True, slots=True)
class Inner:
    """A command inside of a wrapper's arguments."""

    argv: list[str]
    values: Mapping[str, str]
    """Values of the wrapper's own options, by the names in `Wrapper.valued`."""
    tags: frozenset[str]
    """Tags of what is set for the command."""


def inner_command(argv: list[str], wrapper: Wrapper) -> Inner:
    """The command inside of a wrapper's arguments."""
    index, operands, options = 0, wrapper.operands, True
    tags: set[str] = set()
    values: dict[str, str] = {}
    while index < len(argv):
        arg = plain(argv[index])
        if options and arg.startswith("-") and arg != "-":
            options = arg != "--"
            name, joined = option(arg, wrapper.valued)
            if name:
                values[name] = "".join(argv[index + 1 : index + 2]) if joined is None else joined
            index += 2 if name and joined is None else 1
        elif wrapper.assignments and re.match(r"[A-Za-z_]\w*=", arg):
            tags |= {f"sets:{arg.partition('=')[0]}", f"sets:{arg}"}
            index += 1
        elif operands:
            operands -= 1
            index += 1
        else:
            break
    return Inner(argv[index:], values, frozenset(tags))


def option(arg: str, valued: Collection[str]) -> tuple[str, str | None]:
    """The option with a value that an argument is, and its value if that is joined to it; without a name if it is none.

    A long option may be cut short, short ones may stand together.
    """
    if arg.startswith("--"):
        name, equals, value = arg.partition("=")
        whole = next((one for one in sorted(valued) if one.startswith(name)), "") if name != "--" else ""
        return whole, value if equals else None
    for index, letter in enumerate(arg):
        if index and f"-{letter}" in valued:
            return f"-{letter}", arg[index + 1 :] or None
    return "", None


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
    taken = inner_command(run.argv[2:], _UV)
    if place := taken.values.get("--directory"):
        walker.session.cwd = walker.session.absolute(place)
    return walker.program(run.but(taken.argv)) if taken.argv else None


def docker(walker: Walker, run: Run) -> str | None:
    """`docker exec CONTAINER command` and `docker run IMAGE command`."""
    place = next((i for i, arg in enumerate(run.argv) if plain(arg) in ("exec", "run")), 0)
    inner = inner_command(run.argv[place + 1 :], _DOCKER).argv if place else []
    outer = run.argv[: len(run.argv) - len(inner)]
    mounts = _mounts(outer)
    walker.note(run.but([mounts[arg][0] if arg in mounts else arg for arg in outer]))
    if inner:
        links = walker.session.links
        walker.session.links = links | {target: walker.session.absolute(source) for source, target in mounts.values()}
        walker.program(run.but(inner))
        walker.session.links = links
    return None


def _mounts(argv: list[str]) -> dict[str, tuple[str, str]]:
    """Arguments that mount a directory of this machine in a container: where it is here, and where there."""
    found = {}
    for before, arg in pairwise(argv):
        name, _, joined = arg.partition("=")
        value = joined if name in ("--volume", "--mount") else arg if before in ("-v", "--volume", "--mount") else ""
        parts = dict(one.partition("=")[::2] for one in value.split(","))
        source, target = (
            parts.get("src", parts.get("source", "")),
            parts.get("dst", parts.get("target", parts.get("destination", ""))),
        )
        if value and not target:
            source, _, rest = value.partition(":")
            target = rest.partition(":")[0]
        if source and target.startswith("/") and (source.startswith(("/", ".", "~")) or not known(source)):
            found[arg] = (source, target.rstrip("/") or "/")
    return found
