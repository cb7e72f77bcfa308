"""Programs that run other programs, that run code, or that change the state of the shell.

Each handler notes the call and goes on into what it runs. The walker is given them, so that it does not import them.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Callable
from dataclasses import dataclass, replace

from opd.guard.facts import Streams
from opd.guard.shell.fields import ACTIVE, STAR, UNKNOWN, known, plain
from opd.guard.shell.walk import Run, Walker

Handler = Callable[[Walker, Run], str | None]


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
    "sudo": _wrapper("-u -g -C -h -p -U -D -R -T", assignments=True),
    "doas": _wrapper("-u -C"),
    "env": _wrapper("-u -C --unset --chdir", assignments=True),
    "nice": _wrapper("-n"),
    "ionice": _wrapper("-c -n"),
    "timeout": _wrapper("-k -s", 1),
    "nohup": _wrapper(),
    "time": _wrapper("-f -o"),
    "stdbuf": _wrapper("-i -o -e"),
    "setsid": _wrapper(),
    "command": _wrapper(),
    "builtin": _wrapper(),
    "exec": _wrapper("-a"),
    "busybox": _wrapper(),
    "toybox": _wrapper(),
    "chroot": _wrapper("", 1),
    "unshare": _wrapper(),
    "strace": _wrapper("-e -o -p -s"),
    "ltrace": _wrapper("-e -o -p -s"),
    "watch": _wrapper("-n"),
    "flock": _wrapper("-w", 1),
    "ssh": _wrapper("-o -p -i -l -F -J", 1),
}
SHELLS = ("sh", "bash", "dash", "zsh", "ksh", "ash")
_INLINE = {"python": "c", "perl": "eEn", "ruby": "e", "node": "ep", "php": "r"}
_INLINE_LONG = {"--eval", "--print", "--run"}


def _wrapped(walker: Walker, run: Run) -> str | None:
    name = plain(run.argv[0]).rpartition("/")[2]
    wrapper = WRAPPERS[name]
    inner, tags = _inner(run.argv[1:], wrapper)
    outer = run.argv[: len(run.argv) - len(inner)]
    if name not in ("exec", "command", "builtin", "busybox", "toybox", "nohup") or not inner:
        walker.note(run.but(outer if inner else run.argv))
    if not inner:
        walker.session.written.update(dict.fromkeys(run.streams.truncates))
        return None
    if name == "ssh":
        return walker.text(" ".join(plain(a) for a in inner), run.streams)
    return walker.run(Run(inner, run.streams, run.tags | tags))


def _inner(argv: list[str], wrapper: Wrapper) -> tuple[list[str], frozenset[str]]:
    """The command inside of a wrapper's arguments, and tags of what is set for it."""
    index, operands = 0, wrapper.operands
    tags: set[str] = set()
    while index < len(argv):
        arg = plain(argv[index])
        if arg.startswith("-") and arg != "-":
            index += 2 if arg in wrapper.valued else 1
        elif wrapper.assignments and re.match(r"[A-Za-z_]\w*=", arg):
            tags.add(f"sets:{arg.partition('=')[0]}")
            index += 1
        elif operands:
            operands -= 1
            index += 1
        else:
            break
    return argv[index:], frozenset(tags)


def _shell(walker: Walker, run: Run) -> str | None:
    argv = run.argv
    for index, arg in enumerate(argv[1:], 1):
        if plain(arg).startswith("-") and plain(arg).endswith("c") and not plain(arg).startswith("--"):
            return _inline_shell(walker, run, argv[index + 1 :])
    operands = [arg for arg in argv[1:] if not arg.startswith(("-", "+"))]
    if operands and "-s" not in argv:
        return _script_file(walker, run, argv, operands)
    walker.note(run)
    streams = run.streams
    if streams.stdin is not None and known(streams.stdin):
        return walker.text(streams.stdin, Streams(), walker.hidden(streams.sources))
    if streams.has_stdin:
        _unseen(walker, run)
    return None


def _inline_shell(walker: Walker, run: Run, rest: list[str]) -> str | None:
    walker.note(run.but(run.argv[:1]))
    if not rest or not known(rest[0]):
        _unseen(walker, run)
        return None
    kept, walker.session.positional = walker.session.positional, rest[2:]
    text = plain(rest[0])
    if len(rest) > 1:
        text = text.replace("$0", plain(rest[1])).replace("${0}", plain(rest[1]))
    try:
        return walker.text(text, run.streams, walker.hidden(run.streams.sources))
    finally:
        walker.session.positional = kept


def _script_file(walker: Walker, run: Run, argv: list[str], operands: list[str]) -> str | None:
    walker.note(run)
    path = walker.session.absolute(operands[0])
    text = walker.session.written.get(path)
    if text is not None:
        place = argv.index(operands[0])
        return walker.file_code(text, run.but(argv[place:]))
    if path in walker.session.written or not known(operands[0]):
        _unseen(walker, run)
    return None


def _unseen(walker: Walker, run: Run) -> None:
    """Note that this call runs code which we cannot see."""
    walker.calls[-1] = replace(walker.calls[-1], tags=walker.calls[-1].tags | {"unseen"})


def _eval(walker: Walker, run: Run) -> str | None:
    walker.note(run.but(run.argv[:1]))
    text = " ".join(run.argv[1:])
    if not known(text):
        _unseen(walker, run)
        return None
    return walker.text(plain(text), run.streams, walker.hidden(run.streams.sources))


def _source(walker: Walker, run: Run) -> str | None:
    walker.note(run)
    if len(run.argv) < 2:
        return None
    path = walker.session.absolute(run.argv[1])
    if text := walker.session.written.get(path):
        return walker.text(text, run.streams, walker.hidden(walker.behind.get(path, ())))
    if path in walker.session.written or not known(path):
        _unseen(walker, run)
    return None


def _language(language: str) -> Handler:
    def handler(walker: Walker, run: Run) -> str | None:
        texts, rest, module = _inline(language, run.argv[1:])
        operands = [arg for arg in rest if not arg.startswith("-")]
        if texts:
            walker.note(run)
            for text in texts:
                if not known(text):
                    _unseen(walker, run)
                walker.code(language, plain(text).replace("…", "unknown_value"), run)
            return None
        walker.note(run)
        if module:
            return None
        if operands and operands[0] != "-":
            if text := walker.session.written.get(walker.session.absolute(operands[0])):
                walker.code(language, text, run)
        elif run.streams.has_stdin:
            if run.streams.stdin is None or not known(run.streams.stdin):
                _unseen(walker, run)
            else:
                walker.code(language, plain(run.streams.stdin), run)
        return None

    return handler


def _inline(language: str, argv: list[str]) -> tuple[list[str], list[str], bool]:
    """Code in the arguments, the other arguments, and whether a module or a file that exists is what runs."""
    letters, texts, rest = _INLINE[language], [], []
    index = 0
    while index < len(argv):
        arg = plain(argv[index])
        if arg == "-m" and language == "python":
            return [], argv, True
        short = re.fullmatch(r"-[A-Za-z0-9]*", arg) and not arg.startswith("--")
        if (
            short and len(arg) > 1 and arg[-1] in letters and not (language == "perl" and arg == "-n")
        ) or arg in _INLINE_LONG:
            texts += argv[index + 1 : index + 2]
            index += 1
            if language == "python":
                return texts, [*rest, *argv[index + 1 :]], False
        else:
            rest.append(argv[index])
        index += 1
    return texts, rest, False


def _awk(walker: Walker, run: Run) -> str | None:
    walker.note(run)
    programs = [arg for arg in run.argv[1:] if "{" in plain(arg)]
    for text in programs[:1]:
        walker.code("awk", plain(text), run)
    return None


def _xargs(walker: Walker, run: Run) -> str | None:
    inner, _ = _inner(run.argv[1:], _wrapper("-I -n -L -P -d -s -a -E --max-args --delimiter --max-procs"))
    mark = _option(run.argv, "-I")
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


def _option(argv: list[str], name: str) -> str:
    """The value of a short option, written apart or joined."""
    for index, arg in enumerate(argv):
        if plain(arg) == name and index + 1 < len(argv):
            return plain(argv[index + 1])
        if arg.startswith(name) and len(arg) > len(name):
            return plain(arg)[len(name) :]
    return ""


def _parallel(walker: Walker, run: Run) -> str | None:
    walker.note(run.but(run.argv[:1]))
    if ":::" not in run.argv:
        return None
    place = run.argv.index(":::")
    inner, _ = _inner(run.argv[1:place], _wrapper("-j -I"))
    for item in run.argv[place + 1 : place + 17]:
        called = [arg.replace("{}", item) for arg in inner]
        walker.run(Run(called if called != inner else [*inner, item], Streams(), run.tags))
    return None


def _find(walker: Walker, run: Run) -> str | None:
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
                        [one.replace("{}", target).replace("\ue004\ue006", target) for one in inner],
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
    """Globs of what a find may find: its roots with the patterns of its names."""
    names = [argv[i + 1] for i, arg in enumerate(argv[:-1]) if arg in ("-name", "-iname")]
    flat = "-maxdepth" in argv and argv[argv.index("-maxdepth") + 1 :][:1] == ["1"]
    middle = "" if flat else STAR + STAR + "/"
    return [
        f"{root.rstrip('/')}/{middle}{name.translate(ACTIVE)}" if name != "." else root
        for root in _roots(argv)
        for name in names or ["*"]
    ]


def _cd(walker: Walker, run: Run) -> str | None:
    session = walker.session
    operands = [arg for arg in run.argv[1:] if not arg.startswith("-")]
    walker.note(run.but([run.argv[0], *operands]))
    if plain(run.argv[0]) == "pushd":
        session.variables["DIRSTACK"] = session.cwd
    target = operands[0] if operands else session.home
    if plain(run.argv[0]) == "popd":
        target = session.variables.get("DIRSTACK", session.cwd)
    session.cwd = session.absolute(target) if known(target) else posixpath.join(session.cwd, UNKNOWN)
    return ""


def _declare(walker: Walker, run: Run) -> str | None:
    walker.note(run)
    for arg in run.argv[1:]:
        name, equals, value = arg.partition("=")
        if equals and not arg.startswith("-"):
            walker.session.variables[plain(name)] = value
            _tag(walker, f"sets:{plain(name)}")
    return ""


def _tag(walker: Walker, tag: str) -> None:
    walker.calls[-1] = replace(walker.calls[-1], tags=walker.calls[-1].tags | {tag})


def _read(walker: Walker, run: Run) -> str | None:
    walker.note(run)
    for arg in run.argv[1:]:
        walker.session.variables.pop(plain(arg), None)
    return ""


def _set(walker: Walker, run: Run) -> str | None:
    walker.note(run)
    if "--" in run.argv:
        walker.session.positional = run.argv[run.argv.index("--") + 1 :]
    return ""


def _trap(walker: Walker, run: Run) -> str | None:
    walker.note(run.but(run.argv[:1]))
    if len(run.argv) > 2 and known(run.argv[1]) and plain(run.argv[1]) not in ("-", ""):
        walker.text(plain(run.argv[1]))
    return ""


def _copies(walker: Walker, run: Run) -> str | None:
    """`cp`, `mv`, `ln`: what is behind the new name is what was behind the old one."""
    walker.note(run)
    session = walker.session
    operands = [arg for arg in run.argv[1:] if not arg.startswith("-")]
    if len(operands) == 1 and plain(run.argv[0]).endswith("ln"):
        operands.append(posixpath.basename(operands[0]))
    if len(operands) < 2:
        return ""
    place = posixpath.normpath(posixpath.join(session.cwd, plain(operands[-1])))
    symbolic = plain(run.argv[0]).endswith("ln") and any("s" in arg for arg in run.argv[1:] if arg.startswith("-"))
    for operand in operands[:-1]:
        source = posixpath.normpath(plain(operand)) if symbolic else session.absolute(operand)
        base = posixpath.dirname(place) if symbolic else session.cwd
        source = session.absolute(posixpath.join(base, source))
        text = session.written.get(source)
        for name in {place, posixpath.join(place, posixpath.basename(plain(operand)))}:
            if name != source:
                session.written.pop(name, None)
                session.links[name] = source
                if text is not None:
                    session.wrote(name, text)
    return ""


def _script(walker: Walker, run: Run) -> str | None:
    """`script -c` and `su -c`: the command is one argument."""
    walker.note(run)
    for index, arg in enumerate(run.argv[1:-1], 1):
        if arg.startswith("-") and arg.endswith("c"):
            walker.text(plain(run.argv[index + 1]), run.streams)
    return None


def _make(walker: Walker, run: Run) -> str | None:
    walker.note(run)
    if _option(run.argv, "-f") in ("-", "/dev/stdin") and run.streams.stdin:
        for line in run.streams.stdin.split("\n"):
            if line.startswith("\t"):
                walker.text(line.strip().lstrip("@-"))
    return None


def _runner(walker: Walker, run: Run) -> str | None:
    """`uv run`, `poetry run`, `pipenv run`."""
    if run.argv[1:2] != ["run"]:
        walker.note(run)
        return None
    inner, _ = _inner(run.argv[2:], _wrapper("--with --python --extra"))
    return walker.run(run.but(inner)) if inner else None


def _docker(walker: Walker, run: Run) -> str | None:
    """`docker exec CONTAINER command` and `docker run IMAGE command`."""
    walker.note(run)
    place = next((i for i, arg in enumerate(run.argv) if plain(arg) in ("exec", "run")), 0)
    if place:
        inner, _ = _inner(run.argv[place + 1 :], _wrapper("-v -w -e -u -p --name --network --volume --env", 1))
        if inner:
            walker.run(run.but(inner))
    return None


PROGRAMS: dict[str, Handler] = {
    **dict.fromkeys(WRAPPERS, _wrapped),
    **dict.fromkeys(SHELLS, _shell),
    **{name: _language("python") for name in ("python", "python2", "python3", "pypy", "pypy3", "ipython")},
    **{f"python3.{minor}": _language("python") for minor in range(6, 16)},
    **{name: _language(name) for name in ("perl", "ruby", "node", "php")},
    **dict.fromkeys(("nodejs", "bun", "deno"), _language("node")),
    **dict.fromkeys(("awk", "gawk", "mawk", "nawk"), _awk),
    **dict.fromkeys(("cd", "pushd", "popd"), _cd),
    **dict.fromkeys(("export", "declare", "local", "readonly", "typeset"), _declare),
    **dict.fromkeys(("read", "mapfile", "readarray", "unset"), _read),
    **dict.fromkeys(("cp", "mv", "ln", "link"), _copies),
    **dict.fromkeys(("script", "su"), _script),
    **dict.fromkeys(("docker", "podman"), _docker),
    **dict.fromkeys(("uv", "poetry", "pipenv"), _runner),
    **dict.fromkeys(("make", "gmake"), _make),
    "eval": _eval,
    "source": _source,
    ".": _source,
    "xargs": _xargs,
    "parallel": _parallel,
    "find": _find,
    "set": _set,
    "trap": _trap,
}
