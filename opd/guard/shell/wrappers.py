"""Handlers (`walk.Handler`) of wrappers: programs such as `sudo`, `timeout` or `docker` that run a command in their arguments."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from itertools import pairwise

from opd.guard.shell.fields import is_fully_known, show_field
from opd.guard.shell.walk import ProgramRun, Walker


@dataclass(frozen=True, slots=True)
class Wrapper:
    """Arguments of a wrapper that stand before the command."""

    options: str = ""
    """Options whose next argument is their value, with blanks between them."""
    operands: int = 0
    """The number of operands before the command, such as the one time of `timeout`."""
    assignments: bool = False
    """True if `NAME=value` may stand before the command."""
    chdir: tuple[str, ...] = ()
    """Options whose value is the directory in which the command runs."""

    @property
    def options_with_value(self) -> list[str]:
        """The words of `options`."""
        return self.options.split()


WITHOUT_VALUES = (
    "nohup", "setsid", "command", "builtin", "busybox", "toybox", "fakeroot", "unbuffer", "xvfb-run", "linux64", "systemd-run",
    "rlwrap", "valgrind", "catchsegv", "prlimit",
)  # fmt: skip
"""Wrappers with nothing before the command but options without a value."""
WRAPPERS = {
    "sudo": Wrapper(
        "-u -g -C -h -p -U -D -R -T -r -t --user --group --close-from --host --prompt --other-user --chdir --chroot "
        "--command-timeout --role --type",
        assignments=True,
        chdir=("-D", "--chdir"),
    ),
    "doas": Wrapper("-u -C"),
    "env": Wrapper("-u -C --unset --chdir", assignments=True, chdir=("-C", "--chdir")),
    "nice": Wrapper("-n --adjustment"),
    "ionice": Wrapper("-c -n --class --classdata"),
    "timeout": Wrapper("-k -s --kill-after --signal", 1),
    "time": Wrapper("-f -o --format --output"),
    "stdbuf": Wrapper("-i -o -e --input --output --error"),
    **dict.fromkeys(WITHOUT_VALUES, Wrapper()),
    **dict.fromkeys(("setarch", "chrt"), Wrapper(operands=1)),
    "exec": Wrapper("-a"),
    "chroot": Wrapper("--groups --userspec", 1),
    "unshare": Wrapper("-w -S -G -R --wd --setuid --setgid --root", chdir=("-w", "--wd")),
    "nsenter": Wrapper("-t -S -G --target --setuid --setgid --wd", chdir=("--wd",)),
    **dict.fromkeys(("strace", "ltrace"), Wrapper("-e -o -p -s")),
    "watch": Wrapper("-n --interval"),
    "flock": Wrapper("-w -E --timeout --wait --conflict-exit-code", 1),
    "ssh": Wrapper("-o -p -i -l -F -J", 1),
}


_UV = Wrapper(
    "-p --with --with-requirements --python --extra --group --package --project --directory --env-file --index-url"
)
_DOCKER = Wrapper(
    "-v -w -e -u -p -h -l -m --name --network --volume --env --env-file --user --workdir --publish --mount --entrypoint "
    "--hostname --label --memory --cpus --gpus --platform",
    1,
)
TEXT_OPTIONS = {"env": ("-S", "--split-string"), "flock": ("-c", "--command")}
"""Options behind which the command is a single argument, which is taken apart as a script."""


def handle_wrapper(walker: Walker, run: ProgramRun) -> str | None:
    """Walk a wrapper of `WRAPPERS`: note its own call with the tag `wraps`, then walk the command in it."""
    name = show_field(run.argv[0]).rpartition("/")[2]
    wrapper = WRAPPERS[name]
    run = run.with_argv(_separate_joined_options(run.argv, wrapper, TEXT_OPTIONS.get(name, ())))
    command = find_inner_command(run.argv[1:], wrapper)
    inner = command.argv
    outer = run.argv[: len(run.argv) - len(inner)]
    # A call of one of these says no more than the command in it.
    if name not in ("exec", "command", "builtin", "busybox", "toybox", "nohup") or not inner:
        walker.note_call(run.with_argv(outer if inner else run.argv))
        if inner:
            walker.tag_last_call("wraps")
    if not inner:
        walker.session.written.update(dict.fromkeys(run.streams.truncates))
        return None
    directories = [command.values[option] for option in wrapper.chdir if option in command.values]
    if directory := outer[-1] if name == "chroot" else "".join(directories[:1]):
        # Each wrapper with a directory is a process of its own, so that the change ends with it.
        walker.session.cwd = walker.session.resolve_path(directory)
    if name == "ssh" or show_field(outer[-1]) in TEXT_OPTIONS.get(name, ()):
        return walker.walk_text(" ".join(show_field(a) for a in inner), run.streams)
    return walker.walk_program(ProgramRun(inner, run.streams, run.tags | command.tags))


def _separate_joined_options(argv: list[str], wrapper: Wrapper, options: tuple[str, ...]) -> list[str]:
    """Return the arguments of a wrapper with a text that is joined to one of these options, as in `env -S'ls -l'`, as an argument of
    its own behind the option."""
    index = 1
    while index < len(argv) and ((arg := show_field(argv[index])).startswith("-") or "=" in arg):
        for option in options:
            joined = f"{option}=" if option.startswith("--") else option
            if arg.startswith(joined) and len(arg) > len(joined):
                return [*argv[:index], option, argv[index][len(joined) :], *argv[index + 1 :]]
        name, value = parse_option(arg, wrapper.options_with_value)
        index += 2 if name and value is None else 1
    return argv


@dataclass(frozen=True, slots=True)
class InnerCommand:
    """The command in the arguments of a wrapper, and what the wrapper says about it."""

    argv: list[str]
    """The command; empty if there is none."""
    values: Mapping[str, str]
    """Option of the wrapper, as in `Wrapper.options_with_value` -> its value."""
    tags: frozenset[str]
    """Tags for the variables that the wrapper sets for the command, such as `sets:NAME`."""


def find_inner_command(argv: list[str], wrapper: Wrapper) -> InnerCommand:
    """Return the command in a wrapper's arguments, which is what follows its options, assignments and operands."""
    index, operands_left, may_be_option = 0, wrapper.operands, True
    tags: set[str] = set()
    values: dict[str, str] = {}
    while index < len(argv):
        arg = show_field(argv[index])
        if may_be_option and arg.startswith("-") and arg != "-":
            may_be_option = arg != "--"
            name, joined = parse_option(arg, wrapper.options_with_value)
            if name:
                values[name] = "".join(argv[index + 1 : index + 2]) if joined is None else joined
            index += 2 if name and joined is None else 1
        elif wrapper.assignments and re.match(r"[A-Za-z_]\w*=", arg):
            tags |= {f"sets:{arg.partition('=')[0]}", f"sets:{arg}"}
            index += 1
        elif operands_left:
            operands_left -= 1
            index += 1
        else:
            break
    return InnerCommand(argv[index:], values, frozenset(tags))


def parse_option(arg: str, options_with_value: Collection[str]) -> tuple[str, str | None]:
    """Return the option with a value that an argument names, and its value if it stands in the same argument, else None. The name is
    empty if the argument names no such option.

    A long option may be cut short (`--us=root` for `--user`), and short ones may stand together (`-nu root` for `-n -u root`).
    """
    if arg.startswith("--"):
        name, equals, value = arg.partition("=")
        full_names = [option for option in sorted(options_with_value) if option.startswith(name) and name != "--"]
        return "".join(full_names[:1]), value if equals else None
    for index, letter in enumerate(arg):
        if index and f"-{letter}" in options_with_value:
            return f"-{letter}", arg[index + 1 :] or None
    return "", None


def handle_script(walker: Walker, run: ProgramRun) -> str | None:
    """Walk `script -c COMMAND` or `su -c COMMAND`, where the command is one argument."""
    walker.note_call(run)
    for index, arg in enumerate(run.argv[1:-1], 1):
        if arg.startswith("-") and arg.endswith("c"):
            walker.walk_text(show_field(run.argv[index + 1]), run.streams)
    return None


def handle_project_runner(walker: Walker, run: ProgramRun) -> str | None:
    """Walk `uv run COMMAND`, `poetry run COMMAND` or `pipenv run COMMAND`; any other sub-command is only noted."""
    if run.argv[1:2] != ["run"]:
        walker.note_call(run)
        return None
    command = find_inner_command(run.argv[2:], _UV)
    if directory := command.values.get("--directory"):
        walker.session.cwd = walker.session.resolve_path(directory)
    return walker.walk_program(run.with_argv(command.argv)) if command.argv else None


def handle_docker(walker: Walker, run: ProgramRun) -> str | None:
    """Walk `docker exec CONTAINER COMMAND` or `docker run IMAGE COMMAND`. While the command is walked, directories that are mounted in
    the container are links to those of this machine."""
    position = next((i for i, arg in enumerate(run.argv) if show_field(arg) in ("exec", "run")), 0)
    inner = find_inner_command(run.argv[position + 1 :], _DOCKER).argv if position else []
    outer = run.argv[: len(run.argv) - len(inner)]
    mounts = _find_mounts(outer)
    walker.note_call(run.with_argv([mounts[arg][0] if arg in mounts else arg for arg in outer]))
    if inner:
        session, links = walker.session, walker.session.links
        session.links = links | {target: session.resolve_path(source) for source, target in mounts.values()}
        walker.walk_program(run.with_argv(inner))
        session.links = links
    return None


def _find_mounts(argv: list[str]) -> dict[str, tuple[str, str]]:
    """Return argument -> (path on this machine, path in the container) for each argument that mounts a directory of this machine in a
    container: `-v A:B`, `--volume=A:B` or `--mount type=bind,src=A,dst=B`."""
    mounts = {}
    for previous_arg, arg in pairwise(argv):
        name, _, joined = arg.partition("=")
        value = arg if previous_arg in ("-v", "--volume", "--mount") else ""
        value = joined if name in ("--volume", "--mount") else value
        parts = dict(option.partition("=")[::2] for option in value.split(","))
        source = parts.get("src", parts.get("source", ""))
        target = parts.get("dst", parts.get("target", parts.get("destination", "")))
        if value and not target:  # the short form `A:B` or `A:B:ro`
            source, _, remainder = value.partition(":")
            target = remainder.partition(":")[0]
        if source and target.startswith("/") and (source.startswith(("/", ".", "~")) or not is_fully_known(source)):
            mounts[arg] = (source, target.rstrip("/") or "/")
    return mounts
