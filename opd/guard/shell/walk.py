"""Goes through a script without running it, and lists the calls that it would make.

Both branches of an `if` and the body of every loop are gone through once. What a program prints is worked out where it can be
(`outputs`), so that text which is built and then run is seen as what it is.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from opd.guard.code import Code
from opd.guard.code.other import read_other
from opd.guard.code.python import read_python
from opd.guard.facts import Call, Streams, addresses, facts, urls_in
from opd.guard.session import FILES, Session
from opd.guard.shell.arrays import array, assign
from opd.guard.shell.expand import Expander
from opd.guard.shell.fields import UNKNOWN, has_glob, known, plain
from opd.guard.shell.nodes import (
    Assignment,
    For,
    Function,
    Group,
    Pipeline,
    Process,
    Redirect,
    Script,
    Simple,
    Unreadable,
    Word,
)
from opd.guard.shell.nodes import Command as Node
from opd.guard.shell.outputs import DECODERS, output
from opd.guard.shell.parser import parse
from opd.guard.shell.reader import MAX_CHARACTERS
from opd.guard.shell.work import ARGUMENT, COMMAND, GLOB, PYTHON, Work

MAX_CALLS = 512
MAX_NESTED = 12
MAX_WRAPPED = 32
"""Programs that are each started by the one before, such as `nohup nice timeout 5 ls`."""
MAX_ROUNDS = 16
"""Words of a `for` loop that its body is gone through for."""
NOWHERE = ("/dev/null", "/dev/stdout", "/dev/stderr", "/dev/tty")


@dataclass(slots=True)
class Run:
    """One program call on its way: arguments as fields, where its streams lead, and what is known of its origin."""

    argv: list[str]
    streams: Streams
    tags: frozenset[str] = frozenset()

    def but(self, argv: list[str]) -> Run:
        """The same streams with other arguments: the program inside of a wrapper."""
        return Run(argv, self.streams, self.tags)


Handler = Callable[["Walker", Run], str | None]
"""What goes on into a program: notes its call and returns what it prints, if that is known."""


class Walker:
    """Collects `calls` and changes the session as the script would.

    `special` has the programs that run others or change the shell's state, by name (`programs.PROGRAMS`).
    """

    def __init__(self, session: Session, special: Mapping[str, Handler]) -> None:
        self.session = session
        self._special = special
        self.calls: list[Call] = []
        self.tags: frozenset[str] = frozenset()
        """Tags of all that is gone through at the moment, such as `decoded`."""
        self.behind: dict[str, tuple[str, ...]] = {}
        """The programs behind the path of a process substitution."""
        self._nested = 0
        self._wrapped = 0
        self._work = Work()
        self._expander = Expander(session, self.script, self._work)

    def text(self, text: str, streams: Streams | None = None, tags: frozenset[str] = frozenset()) -> str | None:
        """Go through a script inside of the script; what it prints, if known. Raises: Unreadable."""
        if self._nested >= MAX_NESTED:
            raise Unreadable("too deeply nested")
        self._work.spend(len(text))
        if UNKNOWN in text:
            text = text.replace(UNKNOWN, "__unknown__")
        before, self.tags = self.tags, self.tags | tags
        self._nested += 1
        try:
            return self.script(parse(text), streams)
        finally:
            self._nested -= 1
            self.tags = before

    def script(self, script: Script, streams: Streams | None = None) -> str | None:
        """Go through the pipelines of a script; what they print together, if known."""
        outputs = [self._pipeline(pipeline, streams or Streams()) for pipeline in script]
        return "".join(o for o in outputs if o is not None) if None not in outputs else None

    def _pipeline(self, pipeline: Pipeline, outer: Streams) -> str | None:
        text, sources = outer.stdin, outer.sources
        last, before = 0, len(self.calls)
        for index, command in enumerate(pipeline.commands):
            last, before = before, len(self.calls)
            given = Streams(stdin=text, has_stdin=index > 0 or outer.has_stdin, sources=sources)
            text = self._command(command, given)
            sources = tuple(dict.fromkeys([*sources, *(c.program for c in self.calls[before:] if c.program)]))
            if index:
                feeds = tuple(call.line() for call in self.calls[before:])
                self.calls[last:before] = [replace(call, feeds=feeds) for call in self.calls[last:before]]
        return text

    def _command(self, node: Node, given: Streams) -> str | None:
        self._work.spend(COMMAND)
        if isinstance(node, Simple):
            return self._simple(node, given)
        if isinstance(node, Function):
            self.session.functions[node.name] = node.body
            return ""
        streams = self._connect(node.redirects, given)
        self._bare_redirects(streams)
        printed = self._for(node, streams) if isinstance(node, For) else self._group(node, streams)
        return self._written(streams, printed)

    def _group(self, node: Group, streams: Streams) -> str | None:
        kept = self.session.copy() if node.subshell else None
        outputs = [self.script(body, streams) for body in node.bodies]
        if kept is not None:
            for name in FILES:
                setattr(kept, name, getattr(self.session, name))
            self.session.become(kept)
        whole = "".join(o for o in outputs if o is not None) if None not in outputs else None
        return whole if len(node.bodies) == 1 else None

    def _for(self, node: For, streams: Streams) -> str | None:
        values = [field for word in node.words for field in self._expander.fields(word)]
        outputs: list[str | None] = []
        for value in values[:MAX_ROUNDS] or [UNKNOWN]:
            self.session.variables[node.name] = value
            outputs.append(self.script(node.body, streams))
        return "".join(o for o in outputs if o is not None) if None not in outputs else None

    def _simple(self, node: Simple, given: Streams) -> str | None:
        self.session.read_variables = []
        before = len(self.calls)
        values = [(a, self._value(a)) for a in node.assignments]
        argv = [field for word in node.words for field in self._fields(word)]
        streams = self._connect(node.redirects, given)
        inside = tuple(dict.fromkeys(c.program for c in self.calls[before:] if c.program))
        streams.sources = (*streams.sources, *inside)
        if not argv:
            self._assign(values)
            self._bare_redirects(streams)
            return streams.stdin if any(r.operator == "<" for r in node.redirects) else ""
        used = self.session.read_variables
        if values:
            kept, self.session.variables = self.session.variables, dict(self.session.variables)
            self._assign(values)
        self.session.read_variables = used
        printed = self.run(Run(argv, streams, self._tags(values)))
        if values:
            self.session.variables = kept
        return self._written(streams, printed)

    def _value(self, assignment: Assignment) -> str:
        """The value that is assigned; items of an array with a mark between them."""
        if assignment.items is None:
            return self._expander.value(assignment.value)
        return array(field for word in assignment.items for field in self._fields(word))

    def _tags(self, values: list[tuple[Assignment, str]]) -> frozenset[str]:
        """Tags that come from variables set for one call, such as `LD_PRELOAD=...`."""
        return self.tags | {f"sets:{one.name.partition('[')[0]}" for one, _ in values}

    def _fields(self, word: Word) -> list[str]:
        if len(word) == 1 and isinstance(word[0], Process):
            path = f"/dev/fd/{63 - len(self.session.written)}"
            before = len(self.calls)
            self.session.written[path] = self.script(word[0].body)
            self.behind[path] = tuple(c.program for c in self.calls[before:])
            return [path]
        return self._expander.fields(word)

    def _assign(self, values: list[tuple[Assignment, str]]) -> None:
        for one, value in values:
            assign(self.session.variables, one, value)

    def _connect(self, redirects: list[Redirect], given: Streams) -> Streams:
        """The streams after the redirections."""
        streams = replace(given, reads=[], writes=[], truncates=[], appends=[])
        for redirect in redirects:
            operator = redirect.operator
            if operator in ("<<", "<<<"):
                text = self._expander.value(redirect.target)
                streams.stdin, streams.has_stdin = text + "\n" * (operator == "<<<"), True
                continue
            targets = self._fields(redirect.target)
            paths = [path for field in targets for path in self.session.paths(field, operator in ("<", "<>", "<&"))]
            if not targets or (operator in ("<&", ">&") and plain(targets[0]).rstrip("-").isdigit()):
                continue
            if operator in ("<", "<>", "<&"):
                streams.reads += paths
                streams.stdin, streams.has_stdin = self.session.written.get(paths[0]), True
            if operator not in ("<", "<&"):
                self._opened(redirect, streams, [path for path in paths if path not in NOWHERE])
        return streams

    def _opened(self, redirect: Redirect, streams: Streams, paths: list[str]) -> None:
        """Note files that are opened for writing."""
        streams.writes += paths
        if redirect.operator in (">>", "&>>") and redirect.output:
            streams.appends += paths
        elif redirect.operator in (">", ">|", "&>", ">&") and redirect.output:
            streams.truncates += paths
        elif redirect.operator != "<>":  # errors, say
            note = self.session.appends if redirect.operator == ">>" else self.session.wrote
            for path in paths:
                note(path, None)

    def _bare_redirects(self, streams: Streams) -> None:
        """A call of its own for redirections without a program, or of a whole group."""
        if streams.reads or streams.writes:
            self.add(facts(["cat"], self.session, streams))

    def _written(self, streams: Streams, printed: str | None) -> str | None:
        """Note what was printed where it went; what is left for the standard output."""
        for path in streams.truncates:
            self.session.wrote(path, printed)
        for path in streams.appends:
            self.session.appends(path, printed)
        return "" if streams.truncates or streams.appends else printed

    def add(self, call: Call) -> None:
        """Note a call. Raises: Unreadable if there are too many."""
        if len(self.calls) >= MAX_CALLS:
            raise Unreadable("too many calls")
        own = self.session.written
        reads = tuple(path for path in call.reads if path not in own)
        self.calls.append(replace(call, reads=reads, tags=call.tags | self.tags))

    def tag(self, tag: str) -> None:
        """Add a tag to the call that was noted last."""
        self.calls[-1] = replace(self.calls[-1], tags=self.calls[-1].tags | {tag})

    def run(self, run: Run) -> str | None:
        """Note what one program call does; what it prints, if known. Raises: Unreadable."""
        if self._wrapped >= MAX_WRAPPED:
            raise Unreadable("too deeply nested")
        self._wrapped += 1
        try:
            return self._run(run)
        finally:
            self._wrapped -= 1

    def _run(self, run: Run) -> str | None:
        name = plain(run.argv[0]).rpartition("/")[2] if known(run.argv[0]) else ""
        if name in self.session.functions:
            return self._function(name, run)
        special = self._special.get(name)
        if special is not None:
            return special(self, run)
        if "/" in run.argv[0] and (text := self.session.script(self.session.absolute(run.argv[0]))):
            self.note(run)
            return self.file_code(text, run)
        self.note(run)
        return output(run.argv, run.streams.stdin, self.session)

    def note(self, run: Run) -> None:
        """Add the call as it stands. Raises: Unreadable if there is too much of it."""
        self._work.spend(sum(len(arg) + ARGUMENT + GLOB * has_glob(arg) for arg in run.argv))
        call = facts(run.argv, self.session, run.streams, run.tags)
        written = run.streams.stdin if call.program == "tee" else None
        if run.streams.writes and written is None:
            written = output(run.argv, run.streams.stdin, self.session)
        self.add(replace(call, text=written or ""))

    def _function(self, name: str, run: Run) -> str | None:
        if self._nested >= MAX_NESTED:
            raise Unreadable("too deeply nested")
        kept, self.session.positional = self.session.positional, run.argv[1:]
        self._nested += 1
        try:
            return self._command(self.session.functions[name], run.streams)  # type: ignore[arg-type]
        finally:
            self._nested -= 1
            self.session.positional = kept

    def file_code(self, text: str, run: Run) -> str | None:
        """Go through a script file that the episode wrote, by its first line."""
        first = text.partition("\n")[0]
        for language in ("python", "perl", "ruby", "node", "php"):
            if language in first:
                self.code(language, text, run)
                return None
        kept, self.session.positional = self.session.positional, run.argv[1:]
        try:
            return self.text(text, run.streams)
        finally:
            self.session.positional = kept

    def hidden(self, sources: tuple[str, ...]) -> frozenset[str]:
        """The tag of code that came out of these programs, if one of them decodes."""
        return frozenset({"decoded"}) if set(sources) & DECODERS else frozenset()

    def code(self, language: str, text: str, run: Run) -> None:
        """Note what inline code would do, and go through the commands and the code that it would run. Raises: Unreadable."""
        if self._nested >= MAX_NESTED or len(text) > MAX_CHARACTERS:
            raise Unreadable("too long or too deeply nested")
        self._work.spend(len(text) * PYTHON)
        found = read_python(text) if language == "python" else read_other(language, text)
        self._nested += 1
        before, cwd = self.tags, self.session.cwd
        try:
            self._code_call(language, found, run)
            self.tags = self.tags | ({"decoded"} if "decodes" in found.tags else set())
            for nested in found.nested:
                self.code(language, nested, run)
            for command in found.shell:
                if isinstance(command, list):
                    self.run(Run(command, Streams(), self.tags))
                else:
                    self._shell_in_code(language, command)
        finally:
            self._nested -= 1
            self.tags, self.session.cwd = before, cwd

    def _shell_in_code(self, language: str, command: str) -> None:
        try:
            self.text(command)
        except Unreadable:
            if language == "python":
                raise  # elsewhere any string of the code is tried as a command, and most are none

    def _code_call(self, language: str, found: Code, run: Run) -> None:
        session = self.session
        if found.cwd:
            session.cwd = session.absolute(found.cwd)
        writes = [path for name in found.writes for path in session.paths(name)]
        reads = [path for name in found.mentions for path in session.paths(name) if path not in writes]
        strings = tuple(plain(text) for text in found.strings)
        tags = (found.tags - {"decodes"}) | (
            {"decoded"} if "decodes" in found.tags and (found.shell or found.nested) else set()
        )
        call = Call(
            program=language,
            args=strings,
            reads=tuple(dict.fromkeys([*reads, *run.streams.reads])),
            writes=tuple(dict.fromkeys([*writes, *run.streams.writes])),
            urls=tuple(url for text in strings for url in urls_in(text)),
            uses=tuple(dict.fromkeys(found.uses)),
            env=tuple(dict.fromkeys([*found.env, *session.read_variables])),
            text="\n".join(strings) if found.writes else "",
            sources=run.streams.sources,
            tags=run.tags | tags,
        )
        hosts = addresses(replace(call, argv=call.urls))[1]
        self.add(replace(call, hosts=hosts, argv=("-c", *strings[:8])))
