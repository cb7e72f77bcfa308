"""Goes through a script without running it, and lists the calls that it would make.

All branches are gone through, each in the states of the shell in which it may run (`ways`). What a program prints is worked out
where it can be (`outputs`), so that text which is built and then run is seen as what it is.
"""

from __future__ import annotations

import posixpath
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from opd.guard.code import Code, Started
from opd.guard.code.other import read_other
from opd.guard.code.python import read_python
from opd.guard.facts import Call, Streams, addresses, facts, urls_in
from opd.guard.session import Session
from opd.guard.shell.arrays import array, assign
from opd.guard.shell.compound import group, loop_over
from opd.guard.shell.expand import Expander
from opd.guard.shell.fields import UNKNOWN, has_glob, known, plain
from opd.guard.shell.nodes import (
    Assignment,
    For,
    Function,
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
from opd.guard.shell.ways import Step, apart, in_turn, joined
from opd.guard.shell.work import ARGUMENT, COMMAND, GLOB, PYTHON, Work

MAX_CALLS = 512
MAX_NESTED = 12
MAX_WRAPPED = 32
"""Programs that are each started by the one before, such as `nohup nice timeout 5 ls`."""
SUCCEED = frozenset((
    "cd", "pushd", "popd", "mkdir", "true", ":", "echo", "printf", "pwd", "export", "declare", "local", "readonly", "typeset", "set",
    "unset", "shopt", "umask", "alias",
))  # fmt: skip
"""Programs that are taken to succeed. Of others nobody knows, but for `false`."""
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
        self._success: bool | None = None
        """Whether the last command succeeds; None if nobody knows."""
        self._nested = 0
        self._wrapped = 0
        self._work = Work()
        self._expander = Expander(session, self._substituted, self._work)

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
        if not script:
            return ""
        steps = [Step(one.when, partial(self._pipeline, one, streams or Streams())) for one in script]
        starts = [index for index, step in enumerate(steps) if not step.when]
        lists = [steps[start:end] for start, end in zip(starts, [*starts[1:], len(steps)], strict=True)]
        return joined([self._in_turn(one) for one in lists])

    def _in_turn(self, steps: Sequence[Step]) -> str | None:
        before = len(self.calls)
        printed = in_turn(self.session, steps)
        if self.session.others:  # most calls are the same in each of the states
            self.calls[before:] = dict.fromkeys(self.calls[before:])
        return printed

    def _substituted(self, script: Script) -> str | None:
        return apart(self.session, partial(self.script, script))

    def _pipeline(self, pipeline: Pipeline, outer: Streams) -> tuple[bool | None, str | None]:
        text, sources = outer.stdin, outer.sources
        alone = len(pipeline.commands) == 1 and not pipeline.background
        last, before = 0, len(self.calls)
        for index, command in enumerate(pipeline.commands):
            last, before = before, len(self.calls)
            given = Streams(stdin=text, has_stdin=index > 0 or outer.has_stdin, sources=sources)
            run = partial(self._command, command, given)
            text = run() if alone else apart(self.session, run)
            sources = tuple(dict.fromkeys([*sources, *(c.program for c in self.calls[before:] if c.program)]))
            if index:
                feeds = tuple(call.line() for call in self.calls[before:])
                self.calls[last:before] = [replace(call, feeds=feeds) for call in self.calls[last:before]]
        return (None if pipeline.negated else self._success), text

    def _command(self, node: Node, given: Streams) -> str | None:
        self._work.spend(COMMAND)
        if isinstance(node, Simple):
            return self._simple(node, given)
        if isinstance(node, Function):
            self.session.functions[node.name] = node.body
            return ""
        streams = self._connect(node.redirects, given)
        self._bare_redirects(streams)
        if isinstance(node, For):
            values = [field for word in node.words for field in self._expander.fields(word)]
            printed = loop_over(self.session, node, values, partial(self.script, streams=streams))
        else:
            printed = group(self.session, node, streams, self.script)
        self._success = None
        return self._written(streams, printed)

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
            self._success = None if len(self.calls) > before else True
            return streams.stdin if any(r.operator == "<" for r in node.redirects) else ""
        used = self.session.read_variables
        kept = {name: self.session.variables.get(name) for name in (one.name.partition("[")[0] for one, _ in values)}
        self._assign(values)
        self.session.read_variables = used
        printed = self.run(Run(argv, streams, self._tags(values)))
        for state in (self.session, *self.session.others) if kept else ():
            state.set_back(kept)
        if node.redirects or argv[0] in self.session.functions:
            self._success = None
        else:
            self._success = argv[0] in SUCCEED or (False if argv[0] == "false" else None)
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
            self.session.written[path] = self._substituted(word[0].body)
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
        if run.argv[0] in self.session.functions:
            return self._function(run.argv[0], run)
        return self.program(run)

    def program(self, run: Run) -> str | None:
        """The same for a program that cannot be a function of the shell."""
        if self._wrapped >= MAX_WRAPPED:
            raise Unreadable("too deeply nested")
        self._wrapped += 1
        try:
            return self._program(run)
        finally:
            self._wrapped -= 1

    def _program(self, run: Run) -> str | None:
        name = plain(run.argv[0]).rpartition("/")[2] if known(run.argv[0]) else ""
        special = self._special.get(name)
        if special is not None:
            return special(self, run)
        if "/" in run.argv[0] and (text := self.session.script(self.session.absolute(run.argv[0]))):
            self.note(run)
            return apart(self.session, partial(self.file_code, text, run))
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
        body: Node = self.session.functions[name]  # type: ignore[assignment]
        self._nested += 1
        try:
            return self.with_arguments(run.argv[1:], partial(self._command, body, run.streams))
        finally:
            self._nested -= 1

    def with_arguments(self, arguments: list[str], act: Callable[[], str | None]) -> str | None:
        """Do this where `$1` and the others are these."""
        kept, self.session.positional = self.session.positional, arguments
        try:
            return act()
        finally:
            for state in (self.session, *self.session.others):
                state.positional = kept

    def file_code(self, text: str, run: Run) -> str | None:
        """Go through a script file that the episode wrote, by its first line."""
        first = text.partition("\n")[0]
        for language in ("python", "perl", "ruby", "node", "php"):
            if language in first:
                self.code(language, text, run)
                return None
        return self.with_arguments(run.argv[1:], partial(self.text, text, run.streams))

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
        before = self.tags
        try:
            apart(self.session, partial(self._read_code, language, found, run))
        finally:
            self._nested -= 1
            self.tags = before

    def _read_code(self, language: str, found: Code, run: Run) -> None:
        self._code_call(language, found, run)
        self.tags = self.tags | ({"decoded"} if "decodes" in found.tags else set())
        for nested in found.nested:
            self.code(language, nested, run)
        for started in found.shell:
            apart(self.session, partial(self._started, language, started))

    def _started(self, language: str, started: Started) -> None:
        """Go through a command that code starts."""
        self.session.cwd = self.session.absolute(started.cwd)
        if isinstance(started.command, list):
            self.program(Run(started.command, Streams(), self.tags))
            return
        try:
            self.text(started.command)
        except Unreadable:
            if language == "python":
                raise  # elsewhere any string of the code is tried as a command, and most are none

    def _code_call(self, language: str, found: Code, run: Run) -> None:
        session = self.session
        writes = [path for name in found.writes for path in session.paths(name)]
        later = [posixpath.join(found.cwd, name) for name in found.mentions] if found.cwd else []
        reads = [path for name in found.mentions + later for path in session.paths(name) if path not in writes]
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
