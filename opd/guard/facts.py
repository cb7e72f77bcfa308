"""`ProgramCall`, one call of a program as the rules see it, and the functions that make one of arguments or of code.

What an argument means depends on the program: the sets at the top say for which programs it is a file that is read, one that is
written, a pattern, or none of these. For a program in no set, each argument may be a file that is read.
"""

from __future__ import annotations

import posixpath
import re
from dataclasses import dataclass, field, replace

from opd.guard.code import Code
from opd.guard.session import GuardSession
from opd.guard.shell.fields import has_glob, is_fully_known, show_field

WRITERS = frozenset((
    "touch", "truncate", "chmod", "chown", "chgrp", "rm", "rmdir", "unlink", "shred", "tee", "mkdir", "mkfifo",
    "patch", "setfacl", "chattr",
))  # fmt: skip
"""Programs that change every file in their arguments."""
COPIERS = frozenset(("cp", "mv", "ln", "install", "rsync", "scp", "link"))
"""Programs that read all files but the last and write the last."""
NO_PATHS = frozenset((
    "echo", "printf", "kill", "sleep", "date", "seq", "export", "declare", "local", "set", "unset", "alias", "type",
    "which", "test", "[", "[[", "exit", "return", "true", "false", ":", "expr", "pip", "pip3", "npm", "yarn",
    "brew", "cargo", "uname", "whoami", "trap", "ulimit", "umask", "jobs", "wait", "hash", "compgen", "pgrep",
    "pkill", "killall", "read", "mapfile", "readarray",
))  # fmt: skip
"""Programs whose arguments are no files."""
SCRIPT_FIRST = frozenset((
    "grep", "egrep", "fgrep", "zgrep", "rg", "ag", "sed", "awk", "gawk", "mawk", "nawk", "jq", "yq", "tr", "fd",
    "ack",
))  # fmt: skip
"""Programs whose first argument is a pattern or a script, unless one of `SCRIPT_OPTIONS` gives it."""
SCRIPT_OPTIONS = frozenset({"-e", "-f", "--expression", "--file", "--regexp"})
OPTIONS_WITH_VALUE = {
    "git": {"-C", "-c", "--git-dir", "--work-tree", "--namespace"},
    "head": {"-n", "-c"},
    "tail": {"-n", "-c"},
    "curl": {"-X", "-H", "-d", "-o", "-u", "-A", "-e", "-b", "-m", "--data", "--header", "--output", "--request"},
    "wget": {"-O", "-o", "-P", "-t", "-T", "-U"},
    "ssh": {"-i", "-p", "-o", "-l", "-F", "-J"},
    "scp": {"-i", "-P", "-o", "-l", "-F", "-J"},
    "nc": {"-w", "-p", "-s"},
}
"""Program -> options whose next argument is their value."""
GIT_FILES = frozenset(
    {"grep", "diff", "show", "log", "ls-files", "add", "checkout", "restore", "blame", "archive", "apply", "rm", "mv"}
)
"""Sub-commands of git whose arguments may be files."""
_URL = re.compile(r"\b(?:https?|ftp|git|ssh|rsync|git\+https|svn|wss?)://[^\s'\"<>|;)\]}]+")
_HOST_PATH = re.compile(r"(?:[\w.-]+@)?([\w-]+(?:\.[\w-]+)+|[\w.-]+@[\w-]+|localhost|\d+\.\d+\.\d+\.\d+):(?!//)(.*)")
_TAR_LETTERS = re.compile(r"-?\w*C\w*")
"""Letters of options of `tar`, with or without the dash, among them the `C` that takes the next argument as the directory."""
_IN_PLACE = re.compile(r"-[0-9lnpaE]*i(?:\.|$)|--in-place")
_DEV_TCP = re.compile(r"/dev/(?:tcp|udp)/([^/]+)/")
_DOMAIN = re.compile(r"(?:[\w-]+\.)+[a-z]{2,}(?::\d+)?(?:/.*)?", re.IGNORECASE)
_NETWORK_PROGRAMS = frozenset((
    "curl", "wget", "http", "https", "xh", "nc", "ncat", "netcat", "telnet", "socat", "ssh", "scp", "sftp", "ping",
    "lynx", "w3m", "links", "elinks", "aria2c",
))  # fmt: skip
FILE_URL = "file://"
PYTHONS = frozenset((
    "python", "python2", "python3", "pypy", "pypy3", "ipython", *(f"python3.{minor}" for minor in range(6, 16)),
))  # fmt: skip
_KNOWN_INPUT = frozenset((
    "cat", "tee", "wc", "head", "tail", "sort", "uniq", "grep", "egrep", "fgrep", "tr", "cut", "jq", "base64", "less", "column",
    "md5sum", "sha256sum", "rev", "nl", "diff", "cmp", "patch", "git", "xargs", "parallel", "read", "mapfile", "readarray", "sh",
    "bash", "dash", "zsh", "ksh", "ash", "sponge", "fold", "fmt", "tac", "xxd", "od", "make", "gmake", "source", ".", *PYTHONS,
))  # fmt: skip
"""Programs whose standard input need not be searched for paths, because they only print or store it, or because the walker reads it."""
VIEWERS = frozenset((
    *COPIERS, *WRITERS, "cat", "head", "tail", "less", "more", "wc", "ls", "stat", "file", "du", "cd", "pushd", "git", "grep",
    "egrep", "fgrep", "rg", "ag", "sed", "diff", "cmp", "md5sum", "sha256sum", "sort", "uniq", "tr", "cut", "nl", "black", "ruff",
    "flake8", "mypy", "pylint", "isort", "prettier", "eslint", "gofmt", "rustfmt", "shellcheck", "tree", "find", "bat", "xxd", "od",
    "strings", "test", "[", "[[", "sh", "bash", "dash", "zsh", "ksh", "ash", "source", ".", "echo", "printf", *PYTHONS,
))  # fmt: skip
"""Programs for which the text of a file that the episode wrote need not be searched for paths: to them it is only text, or the walker
reads it."""
RUNNERS = frozenset((
    "pytest", "py.test", "tox", "nox", "make", "gmake", "ninja", "cmake", "ctest", "npm", "npx", "yarn", "pnpm", "jest", "vitest",
    "mocha", "cargo", "go", "mvn", "gradle", "gradlew", "rake", "bundle", "rspec", "rails", "composer", "phpunit", "dotnet", "sbt",
    "pip", "pip3", "uv", "poetry", "pdm", "mix", "meson", "bazel", "just", "invoke", "fab", "docker", "podman", "docker-compose", "vim", "vi", "ex", "nvim", "emacs", "gdb",
    "lldb", "psql", "crontab", "direnv", "coverage", "uvicorn", "gunicorn", "flask", "streamlit", "jupyter", "behave", "hatch",
))  # fmt: skip
"""Programs that may run any file of the project, though no argument names it: `make`, `pytest`."""
PROSE_SUFFIXES = (".md", ".rst", ".txt", ".html", ".css", ".csv", ".log", ".svg")
"""Ends of names of files that nothing runs."""
MAX_ARGUMENT = 1 << 14
"""The most characters of an argument that may be a path. It is longer than any path, since an argument may have many `./`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgramCall:
    """One call of a program, with what it would read, write and reach. A piece of inline code is one, too: its program is the name of the
    language."""

    program: str
    """Name without directory; empty if it is not known."""
    argv: tuple[str, ...] = ()
    """All arguments as plain text, without the program. Inline code: `-c` and its first strings."""
    flags: frozenset[str] = frozenset()
    """Options without their values; `-la` is there as `-la`, `-l` and `-a`."""
    args: tuple[str, ...] = ()
    """Arguments that are no options, without the sub-command of git; the short strings of inline code."""
    reads: tuple[str, ...] = ()
    """Absolute paths that it may read. A glob that could not be listed is one path, with its marks."""
    writes: tuple[str, ...] = ()
    """Absolute paths that it may change or remove."""
    urls: tuple[str, ...] = ()
    hosts: tuple[str, ...] = ()
    git: str = ""
    """Sub-command of git."""
    uses: tuple[str, ...] = ()
    """Dotted names in inline code."""
    env: tuple[str, ...] = ()
    """Variables that it expands or asks for and that the episode did not set."""
    mentions: tuple[str, ...] = ()
    """Absolute paths that stand somewhere in its arguments or `inputs`; empty until `mentions.find_mentions` has looked for them."""
    inputs: tuple[str, ...] = ()
    """Texts beside the arguments in which a path may stand: the argument of a tool, the standard input, strings of code, and files that
    the episode wrote and that the program runs or reads."""
    text: str = ""
    """The text that it writes to a file; empty if it writes none or we do not know it."""
    sources: tuple[str, ...] = ()
    """Programs whose output it gets, from the pipeline before it or from substitutions in its words."""
    feeds: tuple[str, ...] = ()
    """The calls behind it in the pipeline that get its output, each as its `call_line`."""
    tags: frozenset[str] = frozenset()
    """Further facts about the call.

    `unseen`: it runs code that we cannot see. `decoded`: it is, or evaluates, code that comes out of encoded text. `encoded`: also that, and
    the code was encoded for no other reason than to hide it. `unknown`: the name of its program is not known. `outward`: a `find` that
    begins at a root of the system. `wraps`: it runs the program of another call. `writes_unknown`: it writes a file that we cannot
    name. `sets:NAME` and `sets:NAME=VALUE`: a variable is set for it."""

    def call_line(self) -> str:
        """Return the call as one line, for people and for the judge; an ellipsis stands for a program that is not known. A call without
        program and arguments is empty."""
        return " ".join((self.program or "…", *self.argv)) if self.argv or self.program else ""


@dataclass(slots=True)
class Streams:
    """Streams that redirections and the pipeline connect to a call."""

    stdin: str | None = None
    """Text on the standard input; None if there is none or it is not known."""
    has_stdin: bool = False
    """True if something is on the standard input, known or not."""
    sources: tuple[str, ...] = ()
    """See `ProgramCall.sources`."""
    reads: list[str] = field(default_factory=list)
    """Paths of files that redirections open for reading."""
    writes: list[str] = field(default_factory=list)
    """Paths of files that redirections open for writing."""
    truncates: list[str] = field(default_factory=list)
    """Those of `writes` that get the standard output as their whole text."""
    appends: list[str] = field(default_factory=list)
    """Those of `writes` to which the standard output is appended."""


def read_call(
    argv: list[str], session: GuardSession, streams: Streams, tags: frozenset[str] = frozenset()
) -> ProgramCall:
    """Return the call that these arguments make. `argv` are fields, and the first of them is the program."""
    name = argv[0].rpartition("/")[2]
    program = show_field(name) if is_fully_known(name) else ""
    flags, operands, values = _parse_options(program, argv[1:])
    call = ProgramCall(
        program=program,
        argv=tuple(show_field(a) for a in argv[1:]),
        flags=frozenset(flags),
        args=tuple(show_field(a) for a in operands),
        sources=streams.sources,
        inputs=_collect_inputs(program, argv, session, streams),
        env=tuple(dict.fromkeys(session.read_variables)),
        tags=tags | ({"unknown"} if not program else frozenset()),
    )
    if program == "git":
        call = replace(call, git=call.args[0] if call.args else "", args=call.args[1:])
    reads, writes = _find_files(call, operands + _move_operands(program, argv, operands), values, session)
    urls, hosts = find_addresses(call)
    opened = (host for path in streams.reads + streams.writes for host in _DEV_TCP.findall(path))
    hosts = tuple(dict.fromkeys([*hosts, *opened]))
    program_path = session.resolve_argument(argv[0]) if "/" in argv[0] else []
    return replace(
        call,
        reads=tuple(dict.fromkeys([*program_path, *reads, *streams.reads])),
        writes=tuple(dict.fromkeys([*writes, *streams.writes])),
        urls=urls,
        hosts=hosts,
    )


def _collect_inputs(program: str, argv: list[str], session: GuardSession, streams: Streams) -> tuple[str, ...]:
    """Return `ProgramCall.inputs` of a program: its standard input, and the texts of files that the episode wrote and that it may run
    or that it names."""
    inputs = [streams.stdin] if streams.stdin and program not in _KNOWN_INPUT else []
    if not session.written and not session.appended:
        return tuple(inputs)
    # Of a file that is in both, the whole text counts.
    texts = session.appended | session.written
    if program in RUNNERS or (program in PYTHONS and "-m" in argv) or argv[0].startswith(("./", "../")):
        inputs += [text for path, text in texts.items() if text and not path.endswith(PROSE_SUFFIXES)]
    if program not in VIEWERS:
        named = (session.resolve_path(arg) for arg in argv[1:] if len(arg) <= MAX_ARGUMENT)
        inputs += [text for path in named if (text := texts.get(path))]
    return tuple(dict.fromkeys(inputs))


def read_code_call(
    language: str, code: Code, session: GuardSession, streams: Streams, tags: frozenset[str]
) -> ProgramCall:
    """Return code as one call whose program is its language."""
    writes = [path for name in code.writes for path in session.resolve_argument(name)]
    reads = [path for name in code.mentions for path in session.resolve_argument(name) if path not in writes]
    if language in PYTHONS:  # a module is a read of its path, where it may come from outside of the task's directory
        roots = ["/"] if "/" in code.mentions else []
        if not f"{session.cwd}/".startswith(session.begins_at.rstrip("/") + "/"):
            roots.append(session.cwd)
        reads += [session.resolve_path(f"{root}/{name.replace('.', '/')}") for root in roots for name in code.loads]
    strings = tuple(show_field(text) for text in code.strings)
    decoded = {"decoded"} if "decodes" in code.tags and (code.shell or code.nested) else set()
    if decoded and code.nested:
        decoded.add("encoded")
    call = ProgramCall(
        program=language,
        args=strings,
        reads=tuple(dict.fromkeys([*reads, *streams.reads])),
        writes=tuple(dict.fromkeys([*writes, *streams.writes])),
        urls=tuple(dict.fromkeys(url for text in strings for url in _URL.findall(text))),
        uses=tuple(dict.fromkeys(code.uses)),
        env=tuple(dict.fromkeys([*code.env, *session.read_variables])),
        text="\n".join(strings) if code.writes else "",
        inputs=tuple(dict.fromkeys(code.texts)),
        sources=streams.sources,
        tags=tags | (code.tags - {"decodes"}) | decoded,
    )
    # Hosts are read off `argv`, and a string of code is no argument: only its URLs are.
    hosts = find_addresses(replace(call, argv=call.urls))[1]
    return replace(call, hosts=hosts, argv=("-c", *strings[:8]))


def _parse_options(program: str, argv: list[str]) -> tuple[list[str], list[str], list[str]]:
    """Return the options, the operands, which are the arguments that are no options, and the values of options."""
    flags: list[str] = []
    operands: list[str] = []
    values: list[str] = []
    options_with_value = OPTIONS_WITH_VALUE.get(program, ())
    arguments = iter(argv)
    for arg in arguments:
        if arg == "--":
            operands += arguments
        elif arg.startswith("--"):
            name, _, value = arg.partition("=")
            flags.append(name)
            values += [value] if value else []
            values += [next(arguments, "")] if name in options_with_value and not value else []
        elif arg.startswith("-") and len(arg) > 1:
            flags += _split_short_options(arg)
            # A path that is joined to its option: `-I/usr/include`.
            values += [arg[arg.index("/") :]] if "/" in arg else []
            values += [next(arguments, "")] if arg in options_with_value else []
        else:
            operands.append(arg)
    return flags, operands, values


def _move_operands(program: str, argv: list[str], operands: list[str]) -> list[str]:
    """Return the operands as paths below the directories that `git -C` or `tar -C` names, for any of them may be meant. Return none for
    another program, or for a sub-command of git that takes no files."""
    if program not in ("git", "tar", "bsdtar") or (program == "git" and operands[:1] and operands[0] not in GIT_FILES):
        return []
    directory, directories = "", []
    for index, arg in enumerate(argv):
        long = arg.startswith("--dir") and program != "git"
        if long or arg == "-C" or (program != "git" and _TAR_LETTERS.fullmatch(arg) and (index == 1 or arg[0] == "-")):
            value = arg.partition("=")[2] if long and "=" in arg else "".join(argv[index + 1 : index + 2])
            directory = posixpath.join(directory, value)
            directories.append(directory)
    names = operands[1:] if program == "git" else operands
    return [
        posixpath.join(base, name) for base in directories for name in names if name not in ("", "-") and name[0] != "/"
    ]


def _split_short_options(arg: str) -> list[str]:
    """Return the options that an argument such as `-la` may be: itself, and each of its letters. If it is long or has more than letters,
    only its first letter is one, and the rest its value."""
    letters = arg[1:]
    if letters.isalpha() and len(letters) <= 6:
        return [show_field(arg), *(f"-{letter}" for letter in letters)]
    return [show_field(arg), show_field(arg[:2])]


def _find_files(
    call: ProgramCall, operands: list[str], values: list[str], session: GuardSession
) -> tuple[list[str], list[str]]:
    """Return the paths that a call reads and writes, as far as its arguments tell."""
    program = call.program
    if program in NO_PATHS:
        return _resolve_arguments([arg for arg in operands if has_glob(arg)], session), []
    if program == "dd":
        sources, targets = ([arg[3:] for arg in operands if arg.startswith(start)] for start in ("if=", "of="))
        return _resolve_arguments(sources, session), _resolve_arguments(targets, session, False)
    named = _select_file_operands(call, operands)
    outputs = values if program in ("curl", "wget") and call.flags & {"-o", "-O", "--output"} else []
    if program in COPIERS and len(named) > 1:
        changed = named if program == "mv" else named[-1:]  # a move also takes its sources away
        return _resolve_arguments([*named[:-1], *values], session), _resolve_arguments(changed, session, False)
    edits_in_place = program in ("sed", "perl") and any(map(_IN_PLACE.match, call.flags))
    if program in WRITERS or call.git in ("rm", "mv") or edits_in_place:
        return [], _resolve_arguments([*named, *values], session, False)
    reads = _resolve_arguments([*named, *(value for value in values if value not in outputs)], session)
    return reads, _resolve_arguments(outputs, session, False)


def _select_file_operands(call: ProgramCall, operands: list[str]) -> list[str]:
    """Return the operands that may name files; a `find` without any searches the working directory."""
    program = call.program
    if program in SCRIPT_FIRST and not call.flags & SCRIPT_OPTIONS:
        return operands[1:]
    if program == "find":
        return [a for a in operands if "/" in a or a in (".", "..")] or ["."]
    if call.git in ("rm", "mv"):
        return operands[1:]
    return [a for a in operands if "/" in a and not _URL.match(a)] if program == "git" else operands


def _resolve_arguments(arguments: list[str], session: GuardSession, follow_copies: bool = True) -> list[str]:
    """Return the absolute paths that arguments may name; for `follow_copies` see `GuardSession.resolve_path`."""
    return [path for argument in arguments for path in _resolve_argument(argument, session, follow_copies)]


def _resolve_argument(argument: str, session: GuardSession, follow_copies: bool) -> list[str]:
    """Return the absolute paths that one argument may name: itself, and an absolute path behind `=`, `@` or `host:`. Return none if it is
    a URL, empty, or too long for a path."""
    if argument.startswith(FILE_URL):
        return session.resolve_argument(argument.removeprefix(FILE_URL), follow_copies)
    if argument in ("", "-") or _URL.match(show_field(argument)) or len(argument) > MAX_ARGUMENT or "\n" in argument:
        return []
    paths = session.resolve_argument(argument, follow_copies)
    for mark in (":/", "=/", "@/"):
        prefix, separator, suffix = argument.partition(mark)
        if separator:
            paths += session.resolve_argument("/" + suffix, follow_copies)
            paths += session.resolve_argument(prefix, follow_copies) if mark == ":/" and prefix.startswith("/") else []
    return paths


def find_addresses(call: ProgramCall) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the URLs and the hosts that a call names. Programs that only print their arguments name none."""
    if call.program in ("echo", "printf", "grep", "sed", "cat", "rg"):
        return (), ()
    urls: list[str] = []
    hosts: list[str] = []
    for arg in call.argv:
        matches = _URL.findall(arg)
        urls += matches
        if (match := _HOST_PATH.fullmatch(arg)) and call.program in ("scp", "rsync", "git", "ssh", "sftp"):
            hosts.append(match[1].rpartition("@")[2])
        elif call.program in _NETWORK_PROGRAMS and not matches and arg in call.args:
            if _DOMAIN.fullmatch(arg) and call.program in ("curl", "wget", "http", "https", "xh", "lynx", "w3m"):
                urls.append("http://" + arg)
            elif re.fullmatch(r"(?:[\w-]+@)?[\w-]+(?:\.[\w-]+)*(?::\d+.*)?", arg) and not arg.isdigit():
                hosts.append(arg.rpartition("@")[2].partition(":")[0])
        hosts += _DEV_TCP.findall(arg)
    hosts += [parse_host(url) for url in urls]
    return tuple(dict.fromkeys(urls)), tuple(dict.fromkeys(h for h in hosts if h))


def parse_host(url: str) -> str:
    """Return the host of a URL, without user and port."""
    return url.partition("://")[2].partition("/")[0].rpartition("@")[2].partition(":")[0].partition("?")[0]
