"""Goes through a script without running it, and lists the calls that it would make.

All branches are gone through, each in the states of the shell in which it may run (`ways`). What a program prints is worked out
where it can be (`outputs`), so that text which is built and then run is seen as what it is.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial

from opd.guard.code import Code, Started
from opd.guard.code.other import read_other
from opd.guard.code.python import read_python
from opd.guard.facts import PYTHONS, ProgramCall, Streams, read_call, read_code_call
from opd.guard.session import STDIN_NAMES, STDIN_PATH, GuardSession
from opd.guard.shell.arrays import assign_variable, join_items
from opd.guard.shell.builtins import BUILTINS, STOPS, SUCCEED
from opd.guard.shell.compound import walk_for, walk_group
from opd.guard.shell.expand import Expander
from opd.guard.shell.fields import UNKNOWN, UNSET, has_glob, is_fully_known, show_field
from opd.guard.shell.nodes import (
    Assignment,
    For,
    Function,
    List,
    Pipeline,
    Process,
    Redirect,
    Script,
    Simple,
    UnreadableCommand,
    Word,
)
from opd.guard.shell.nodes import Command as Node
from opd.guard.shell.outputs import DECODERS, HIDERS, predict_output
from opd.guard.shell.parser import parse
from opd.guard.shell.reader import MAX_CHARACTERS
from opd.guard.shell.ways import StateStep, join_outputs, list_states, run_in_subprocess, run_list, settle_states
from opd.guard.shell.work import ARGUMENT, CODE_CHARACTER, COMMAND, GLOB, WorkBudget

MAX_CALLS = 512
MAX_NESTED = 12
MAX_RECURSION = 2
"""Times that a function is gone through inside of itself."""
MAX_WRAPPED = 32
"""Programs that are each started by the one before, such as `nohup nice timeout 5 ls`."""
REMOVERS = ("rm", "unlink", "shred", "truncate")
"""Programs that take nothing away where the file is the episode's own."""
DEVICE_FILES = ("/dev/null", "/dev/stdout", "/dev/stderr", "/dev/tty")


@dataclass(slots=True)
class ProgramRun:
    """One program call on its way: arguments as fields, where its streams lead, and what is known of its origin."""

    argv: list[str]
    streams: Streams
    tags: frozenset[str] = frozenset()

    def with_argv(self, argv: list[str]) -> ProgramRun:
        """Return the same streams with other arguments: the program inside of a wrapper."""
        return ProgramRun(argv, self.streams, self.tags)


Handler = Callable[["Walker", ProgramRun], str | None]
"""A handler of a program: it notes its call and returns what it prints, if that is known."""


class Walker:
    """Collects `calls` and changes the session as the script would.

    `special` has the programs that run others or change the shell's state, by name (`programs.PROGRAMS`).
    """

    def __init__(self, session: GuardSession, special: Mapping[str, Handler]) -> None:
        self.session = session
        self._handlers = special
        self.calls: list[ProgramCall] = []
        self.tags: frozenset[str] = frozenset()
        """Tags of all that is gone through at the moment, such as `decoded`."""
        self.process_sources: dict[str, tuple[str, ...]] = {}
        """The programs behind the path of a process substitution."""
        self.descriptor_texts: dict[str, str | None] = {}
        """Text behind a descriptor other than the standard ones, None if we do not know it."""
        self._success: bool | None = None
        """True if the last command succeeds; None if nobody knows."""
        self._may_stop = False
        """True if the last list has a command after which nothing more may run."""
        self._active_names: list[str] = []
        """The functions and the files that are gone through at the moment."""
        self._distinct_calls: set[ProgramCall] = set()
        self._nesting = self._wrapper_depth = 0
        self._work = WorkBudget()
        self._expander = Expander(session, self._walk_substitution, self._work)

    def walk_text(self, text: str, streams: Streams | None = None, tags: frozenset[str] = frozenset()) -> str | None:
        """Go through a script inside of the script. Return what it prints, if known. Raises: UnreadableCommand."""
        if self._nesting >= MAX_NESTED:
            raise UnreadableCommand("too deeply nested")
        self._work.spend(len(text))
        if not is_fully_known(text):
            text = text.replace(UNKNOWN, "__unknown__").replace(UNSET, "")
        old_tags, self.tags = self.tags, self.tags | tags
        self._nesting += 1
        try:
            return self.walk_script(parse(text), streams)
        finally:
            self._nesting -= 1
            self.tags = old_tags

    def walk_script(self, script: Script, streams: Streams | None = None) -> str | None:
        """Go through the pipelines of a script. Return what they print together, if known."""
        printed = []
        stopped: list[GuardSession] = []
        for commands in script:
            self._may_stop = False
            printed.append(self._walk_list(commands, streams or Streams()))
            stopped += list_states(self.session) if self._may_stop else []
        if stopped:  # what comes behind a `return` or a `break` may be left out
            settle_states(self.session, [*list_states(self.session), *stopped])
        return join_outputs(printed)

    def _walk_list(self, commands: List, streams: Streams) -> str | None:
        steps = [
            StateStep(pipeline.when, partial(self._walk_pipeline, pipeline, streams)) for pipeline in commands.pipelines
        ]
        run = partial(run_list, self.session, steps)
        return run_in_subprocess(self.session, run) if commands.background else run()

    def _walk_substitution(self, script: Script) -> str | None:
        self._work.spend(COMMAND + self.session.size)
        return run_in_subprocess(self.session, partial(self.walk_script, script))

    def _walk_pipeline(self, pipeline: Pipeline, outer: Streams) -> tuple[bool | None, str | None]:
        text, sources = outer.stdin, outer.sources
        is_single = len(pipeline.commands) == 1
        previous_start, start = 0, len(self.calls)
        for index, command in enumerate(pipeline.commands):
            previous_start, start = start, len(self.calls)
            inputs = Streams(stdin=text, has_stdin=index > 0 or outer.has_stdin, sources=sources)
            run = partial(self._walk_command, command, inputs)
            text = run() if is_single else run_in_subprocess(self.session, run)
            sources = tuple(dict.fromkeys([*sources, *_program_names(self.calls[start:])]))
            if index:
                # The calls of the command before feed those of this one.
                feeds = tuple(call.call_line() for call in self.calls[start:])
                self.calls[previous_start:start] = [
                    replace(call, feeds=feeds) for call in self.calls[previous_start:start]
                ]
        return (None if pipeline.unsure else self._success), text

    def _walk_command(self, node: Node, inputs: Streams) -> str | None:
        self._work.spend(COMMAND + self.session.size)
        if isinstance(node, Simple):
            return self._walk_simple_command(node, inputs)
        if isinstance(node, Function):
            self.session.functions[node.name] = node.body
            self.add_call(ProgramCall(program="function", args=(node.name,)))
            self._success = True
            return ""
        streams = self._apply_redirects(node.redirects, inputs)
        self._note_redirects_as_cat(streams)
        if isinstance(node, For):
            values = [field for word in node.words for field in self._expander.expand_to_fields(word)]
            printed = walk_for(self.session, node, values, partial(self.walk_script, streams=streams))
        else:
            printed = walk_group(self.session, node, streams, self.walk_script)
        # `break` stops no more than its loop, and `exit` no more than its subshell.
        if isinstance(node, For) or node.kind in ("loop", "subshell"):
            self._may_stop = False
        self._success = None
        return self._note_output(streams, printed)

    def _walk_simple_command(self, node: Simple, inputs: Streams) -> str | None:
        self.session.read_variables = []
        start = len(self.calls)
        values = [(a, self._expand_assigned_value(a)) for a in node.assignments]
        argv = [field for word in node.words for field in self._expand_fields(word)]
        streams = self._apply_redirects(node.redirects, inputs)
        streams.sources = (*streams.sources, *dict.fromkeys(_program_names(self.calls[start:])))
        if not argv:
            self._assign_variables(values)
            self._note_redirects_as_cat(streams)
            self._success = None if len(self.calls) > start else True
            if any(
                "/" in value and " " in value for _, value in values
            ):  # a command that the shell starts by itself, say
                self.add_call(ProgramCall(program="", tags=self._make_variable_tags(values)))
            if self.session.read_variables:  # what it asks of the environment is soon a variable of its own
                self.add_call(ProgramCall(program="", env=tuple(dict.fromkeys(self.session.read_variables))))
            return streams.stdin if any(r.operator == "<" for r in node.redirects) else ""
        printed = self._run_with_variables(values, ProgramRun(argv, streams, self._make_variable_tags(values)))
        self._may_stop = self._may_stop or argv[0] in STOPS
        if node.redirects or argv[0] in self.session.functions:
            self._success = None
        else:
            self._success = argv[0] in SUCCEED or (False if argv[0] == "false" else None)
        return self._note_output(streams, printed)

    def _run_with_variables(self, values: list[tuple[Assignment, str]], run: ProgramRun) -> str | None:
        """Run a call with variables that are set for it alone: `NAME=value program`."""
        used = self.session.read_variables
        old_values = {
            name: self.session.variables.get(name)
            for name in (assignment.name.partition("[")[0] for assignment, _ in values)
        }
        self._assign_variables(values)
        self.session.read_variables = used
        try:
            return self.walk_function_or_program(run)
        finally:
            for state in (self.session, *self.session.other_states) if old_values else ():
                state.restore_variables(old_values)

    def _expand_assigned_value(self, assignment: Assignment) -> str:
        """Return the value that is assigned; items of an array with a mark between them."""
        if assignment.index:
            self._expander.expand_to_value(assignment.index)
        if assignment.items is None:
            return self._expander.expand_to_value(assignment.value)
        return join_items(field for word in assignment.items for field in self._expand_fields(word))

    def _make_variable_tags(self, values: list[tuple[Assignment, str]]) -> frozenset[str]:
        """Tags that come from variables set for one call, such as `LD_PRELOAD=...`."""
        names = [(assignment.name.partition("[")[0], show_field(value)) for assignment, value in values]
        return self.tags | {tag for name, value in names for tag in (f"sets:{name}", f"sets:{name}={value}")}

    def _expand_fields(self, word: Word) -> list[str]:
        if len(word) == 1 and isinstance(word[0], Process):
            # As bash does, which counts down from 63.
            path = f"/dev/fd/{63 - len(self.session.written)}"
            start = len(self.calls)
            self.session.written[path] = self._walk_substitution(word[0].body)
            self.process_sources[path] = tuple(c.program for c in self.calls[start:])
            return [path]
        return self._expander.expand_to_fields(word)

    def _assign_variables(self, values: list[tuple[Assignment, str]]) -> None:
        for assignment, value in values:
            assign_variable(self.session.variables, assignment, value)

    def _apply_redirects(self, redirects: list[Redirect], inputs: Streams) -> Streams:
        """Return the streams after the redirections."""
        streams = Streams(stdin=inputs.stdin, has_stdin=inputs.has_stdin, sources=inputs.sources)
        for redirect in redirects:
            operator = redirect.operator
            if operator in ("<<", "<<<"):
                text = self._expander.expand_to_value(redirect.target) + "\n" * (operator == "<<<")
                self._note_input(streams, redirect.fd, text)
                continue
            targets = self._expand_fields(redirect.target)
            paths = [
                path
                for field in targets
                for path in self.session.resolve_argument(field, operator in ("<", "<>", "<&"))
            ]
            if operator == "<&" and targets and show_field(targets[0]).rstrip("-") in self.descriptor_texts:
                self._note_input(streams, redirect.fd, self.descriptor_texts[show_field(targets[0]).rstrip("-")])
            if not targets or (operator in ("<&", ">&") and show_field(targets[0]).rstrip("-").isdigit()):
                continue
            if operator in ("<", "<>", "<&"):
                streams.reads += paths
                self._note_input(streams, redirect.fd, self.session.written_text(paths[0]))
            if operator not in ("<", "<&"):
                self._note_opened_files(redirect, streams, [path for path in paths if path not in DEVICE_FILES])
        return streams

    def _note_input(self, streams: Streams, fd: str, text: str | None) -> None:
        """Note a text, None if it is not known, on the standard input or on the descriptor of this number or name."""
        if not fd:
            streams.stdin, streams.has_stdin = text, True
            return
        self.descriptor_texts[fd.strip("{}")] = text
        self.session.written[f"/dev/fd/{fd}"] = text

    def _note_opened_files(self, redirect: Redirect, streams: Streams, paths: list[str]) -> None:
        """Note files that are opened for writing."""
        streams.writes += paths
        if redirect.operator in (">>", "&>>") and redirect.output:
            streams.appends += paths
        elif redirect.operator in (">", ">|", "&>", ">&") and redirect.output:
            streams.truncates += paths
        elif redirect.operator != "<>":  # errors, say
            note = self.session.record_append if redirect.operator == ">>" else self.session.record_write
            for path in paths:
                note(path, None)

    def _note_redirects_as_cat(self, streams: Streams) -> None:
        """Note redirections that have no program, or belong to a whole group, as a call of `cat`."""
        if streams.reads or streams.writes:
            self.add_call(read_call(["cat"], self.session, streams))

    def _note_output(self, streams: Streams, printed: str | None) -> str | None:
        """Note what was printed in the files that it went to. Return what the standard output gets."""
        for state in (self.session, *self.session.other_states):
            for path in streams.truncates:
                state.record_write(path, printed)
            for path in streams.appends:
                state.record_append(path, printed)
        return "" if streams.truncates or streams.appends else printed

    def add_call(self, call: ProgramCall) -> None:
        """Note a call. Raises: UnreadableCommand if there are too many."""
        own = self.session.written
        reads = tuple(path for path in call.reads if path not in own)
        if call.program in REMOVERS:
            call = replace(call, writes=tuple(path for path in call.writes if path not in own))
        if reads != call.reads or not self.tags <= call.tags:
            call = replace(call, reads=reads, tags=call.tags | self.tags)
        # The same call in several states counts once.
        self._distinct_calls.add(call)
        if len(self._distinct_calls) > MAX_CALLS:
            raise UnreadableCommand("too many calls")
        self.calls.append(call)

    def tag_last_call(self, tag: str) -> None:
        """Add a tag to the call that was noted last."""
        self.calls[-1] = replace(self.calls[-1], tags=self.calls[-1].tags | {tag})

    def walk_function_or_program(self, run: ProgramRun) -> str | None:
        """Note what one program call does. Return what it prints, if known. Raises: UnreadableCommand."""
        name = run.argv[0]
        if name in self.session.functions and self._active_names.count(name) < MAX_RECURSION:
            return self._walk_function(name, run)
        return self.walk_program(run)

    def walk_program(self, run: ProgramRun) -> str | None:
        """Do as `run`, for a program that cannot be a function of the shell."""
        if self._wrapper_depth >= MAX_WRAPPED:
            raise UnreadableCommand("too deeply nested")
        self._wrapper_depth += 1
        try:
            return self._walk_by_name(run)
        finally:
            self._wrapper_depth -= 1

    def _walk_by_name(self, run: ProgramRun) -> str | None:
        name = show_field(run.argv[0]).rpartition("/")[2] if is_fully_known(run.argv[0]) else ""
        if run.streams.has_stdin and not STDIN_NAMES.isdisjoint(map(show_field, run.argv[1:])):
            self.session.written[STDIN_PATH] = run.streams.stdin
        special = self._handlers.get(name)
        if special is not None:
            own = name in BUILTINS and run.argv[0] == name
            return special(self, run) if own else run_in_subprocess(self.session, partial(special, self, run))
        if "/" in run.argv[0] and (text := self.session.written_text(self.session.resolve_path(run.argv[0]))):
            self.note_call(run)
            return run_in_subprocess(self.session, partial(self.walk_file, text, run))
        self.note_call(run)
        return predict_output(run.argv, run.streams.stdin, self.session)

    def note_call(self, run: ProgramRun) -> None:
        """Add the call as it stands. Raises: UnreadableCommand if there is too much of it."""
        self._work.spend(sum(len(arg) + ARGUMENT + GLOB * has_glob(arg) for arg in run.argv))
        call = read_call(run.argv, self.session, run.streams, run.tags)
        written = run.streams.stdin if call.program == "tee" else None
        if run.streams.writes and written is None:
            written = predict_output(run.argv, run.streams.stdin, self.session)
        self.add_call(replace(call, text=written) if written else call)

    def _walk_function(self, name: str, run: ProgramRun) -> str | None:
        if self._nesting >= MAX_NESTED:
            raise UnreadableCommand("too deeply nested")
        body: Node = self.session.functions[name]  # type: ignore[assignment]
        self._nesting += 1
        self._active_names.append(name)
        try:
            return self.run_with_arguments(run.argv[1:], partial(self._walk_command, body, run.streams))
        finally:
            self._nesting -= 1
            self._active_names.pop()
            self._may_stop = False

    def run_with_arguments(self, arguments: list[str], act: Callable[[], str | None]) -> str | None:
        """Run `act` with these positional arguments, `$1` and so on."""
        old_arguments, self.session.positional = self.session.positional, arguments
        try:
            return act()
        finally:
            for state in (self.session, *self.session.other_states):
                state.positional = old_arguments

    def walk_file(self, text: str, run: ProgramRun) -> str | None:
        """Go through a script file that the episode wrote, by its first line."""
        first_line = text.partition("\n")[0]
        for language in ("python", "perl", "ruby", "node", "php"):
            if language in first_line:
                self.walk_code(language, text, run)
                return None
        return self.run_with_arguments(run.argv[1:], partial(self.walk_text, text, run.streams))

    def make_decoding_tags(self, sources: tuple[str, ...]) -> frozenset[str]:
        """Return the tags of code that came out of these programs, if one of them decodes."""
        hidden = frozenset({"decoded"}) if set(sources) & DECODERS else frozenset[str]()
        return hidden | {"encoded"} if set(sources) & HIDERS else hidden

    def walk_code(self, language: str, text: str, run: ProgramRun) -> None:
        """Note what inline code would do, and go through the commands and the code that it would run. Raises:
        UnreadableCommand."""
        if self._nesting >= MAX_NESTED or len(text) > MAX_CHARACTERS:
            raise UnreadableCommand("too long or too deeply nested")
        self._work.spend(len(text) * CODE_CHARACTER)
        parsed_code = read_python(text) if language == "python" else read_other(language, text)
        self._nesting += 1
        old_tags = self.tags
        try:
            self._walk_parsed_code(language, parsed_code, run)
        finally:
            self._nesting -= 1
            self.tags = old_tags

    def _walk_parsed_code(self, language: str, parsed_code: Code, run: ProgramRun) -> None:
        self.add_call(read_code_call(language, parsed_code, self.session, run.streams, run.tags))
        self.tags = self.tags | ({"decoded"} if "decodes" in parsed_code.tags else set())
        for path, text in parsed_code.files:
            self.session.record_append(self.session.resolve_path(path, follow_copies=False), text)
        for nested in parsed_code.nested:
            self.walk_code(language, nested, run)
        for path, text in filter(None, map(self._choose_file_finder(language), parsed_code.loads)):
            if path not in self._active_names:
                self._active_names.append(path)
                self.walk_code(language, text, run)
                self._active_names.remove(path)
        for started in parsed_code.shell:
            run_in_subprocess(self.session, partial(self._walk_started_command, language, started))

    def _choose_file_finder(self, language: str) -> Callable[[str], tuple[str, str] | None]:
        """Return the function that finds a file of the episode's own by the name by which code of a language loads it."""
        return self.session.written_module if language in PYTHONS else self.session.written_code_file

    def _walk_started_command(self, language: str, started: Started) -> None:
        """Go through a command that code starts."""
        self.session.cwd = self.session.resolve_path(started.cwd)
        if isinstance(started.command, list):
            self.walk_program(ProgramRun(started.command, Streams(), self.tags))
            return
        try:
            self.walk_text(started.command)
        except UnreadableCommand:
            if language == "python":
                raise  # elsewhere any string of the code is tried as a command, and most are none


def _program_names(calls: list[ProgramCall]) -> list[str]:
    """Return the programs of calls, as sources of another one; a `find` that goes through the system is `find outward`, too."""
    named_calls = [call for call in calls if call.program]
    return [*(c.program for c in named_calls), *(f"{c.program} outward" for c in named_calls if "outward" in c.tags)]
