"""Goes through a script without running it, and lists the calls that it would make.

The walker goes through every branch, in each state of the shell in which the branch may run (`ways`). Where it can, it works out
what a program prints (`outputs`), so that a command which a script first puts together and then runs is seen as what it is.

"To walk" a script, a command or code means here: to add its calls to `Walker.calls`, to change the session as it would change the
shell, and to return what it prints, or None if that is not known. "To note" a call means to add it to `Walker.calls`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial

from opd.guard.code import Started
from opd.guard.code.other_languages import read_other
from opd.guard.code.python import read_python
from opd.guard.facts import PYTHONS, ProgramCall, Streams, read_call, read_code_call
from opd.guard.session import STDIN_NAMES, STDIN_PATH, GuardSession
from opd.guard.shell.arrays import assign_variable, join_items
from opd.guard.shell.branches import StateStep, join_outputs, list_states, run_in_subprocess, run_list, settle_states
from opd.guard.shell.compound import walk_for_loop, walk_group
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
from opd.guard.shell.reading_budget import ARGUMENT, CODE_CHARACTER, COMMAND, GLOB, WorkBudget

MAX_CALLS = 512
"""The most different calls of one command. A command with more cannot be read."""
MAX_NESTED = 12
"""The most scripts, functions and pieces of code inside of each other."""
MAX_RECURSION = 2
"""The most times that a function is gone through inside of itself; a further call of it counts as a program of that name."""
MAX_WRAPPED = 32
"""The most programs that each start the next one, such as `nohup nice timeout 5 ls`."""
REMOVERS = ("rm", "unlink", "shred", "truncate")
"""Programs whose writes do not count if the file is one that the episode wrote: it may take back what is its own."""
SUCCEED = frozenset({"cd", "pushd", "mkdir", "true", ":", "echo", "pwd", "export"})
"""Programs that we take to succeed. `false` fails, and of all others nobody knows."""
STOPS = frozenset({"exit", "return", "break", "continue"})
"""Programs behind which the rest of a script may be left out."""
BUILTINS = frozenset((
    "cd", "pushd", "popd", "export", "declare", "local", "readonly", "typeset", "read", "mapfile", "readarray", "unset", "set", "shift",
    "printf", "alias", "eval", "source", ".", "trap", "command", "builtin", "exec",
))  # fmt: skip
"""Programs that are part of the shell and may change its state. All others are processes of their own, which do not."""
DEVICE_FILES = ("/dev/null", "/dev/stdout", "/dev/stderr", "/dev/tty")


@dataclass(slots=True)
class ProgramRun:
    """A program call that is about to be gone through. `read_call` makes a `ProgramCall` of it, which is what rules see."""

    argv: list[str]
    """The program and its arguments as fields, so with marks (`fields`)."""
    streams: Streams
    tags: frozenset[str] = frozenset()
    """Tags that the call gets; see `ProgramCall.tags`."""

    def with_argv(self, argv: list[str]) -> ProgramRun:
        """Return the same call with other arguments, such as those of the program inside of a wrapper."""
        return ProgramRun(argv, self.streams, self.tags)


Handler = Callable[["Walker", ProgramRun], str | None]
"""Walks a program that does more than its own call: it notes the call, goes on into what the program runs, changes the session, and
returns what the program prints, if that is known. `programs.PROGRAMS` has all handlers."""


class Walker:
    """Collects the `calls` of scripts, and changes the session as the scripts would change the shell."""

    def __init__(self, session: GuardSession, handlers: Mapping[str, Handler]) -> None:
        """`handlers` are the programs that run others or change the shell's state, by name (`programs.PROGRAMS`)."""
        self.session = session
        self._handlers = handlers
        self.calls: list[ProgramCall] = []
        self.tags: frozenset[str] = frozenset()
        """Tags that every call gets that is noted now, such as `decoded` while code is walked that came out of encoded text."""
        self.process_sources: dict[str, tuple[str, ...]] = {}
        """Path of a process substitution, such as `/dev/fd/63` -> the programs that write what is read there."""
        self.descriptor_texts: dict[str, str | None] = {}
        """Number or name of a file descriptor, the standard ones apart -> the text that is read from it; None if it is not known."""
        self._success: bool | None = None
        """True if the last command succeeds; None if nobody knows."""
        self._may_stop = False
        """True if the present list has an `exit`, `return`, `break` or `continue`, so that the rest of its script may not run."""
        self._active_names: list[str] = []
        """Names of functions and paths of code files that are being walked, the outermost first."""
        self._distinct_calls: set[ProgramCall] = set()
        self._nesting = self._wrapper_depth = 0
        """Numbers of scripts or pieces of code, and of wrappers such as `nohup`, that are open around what is walked now."""
        self._work = WorkBudget()
        self._expander = Expander(session, self._walk_substitution, self._work)

    def walk_text(self, text: str, streams: Streams | None = None, tags: frozenset[str] = frozenset()) -> str | None:
        """Parse a script and walk it; its calls also get these tags. Return what it prints, if known. Raises: UnreadableCommand."""
        with self._nested(tags):
            self._work.spend(len(text))
            if not is_fully_known(text):  # the parser knows no marks, and something has to stand in their place
                text = text.replace(UNKNOWN, "__unknown__").replace(UNSET, "")
            return self.walk_script(parse(text), streams)

    @contextmanager
    def _nested(self, tags: frozenset[str] = frozenset()) -> Iterator[None]:
        """Count one more script, function or piece of code around what is walked in the block, whose calls also get these tags. Raises:
        UnreadableCommand if they are too many."""
        if self._nesting >= MAX_NESTED:
            raise UnreadableCommand("too deeply nested")
        old_tags, self.tags = self.tags, self.tags | tags
        self._nesting += 1
        try:
            yield
        finally:
            self._nesting -= 1
            self.tags = old_tags

    def walk_script(self, script: Script, streams: Streams | None = None) -> str | None:
        """Walk the lists of a script. Return what they print together, if known."""
        printed = []
        stopped: list[GuardSession] = []
        for commands in script:
            self._may_stop = False
            printed.append(self._walk_list(commands, streams or Streams()))
            stopped += list_states(self.session) if self._may_stop else []
        if stopped:  # the script may have ended at a `return` or a `break`, and then its rest changed nothing
            settle_states(self.session, [*list_states(self.session), *stopped])
        return join_outputs(printed)

    def _walk_list(self, commands: List, streams: Streams) -> str | None:
        """Walk pipelines that depend on each other: `a && b || c`."""
        steps = [StateStep(p.when, partial(self._walk_pipeline, p, streams)) for p in commands.pipelines]
        run = partial(run_list, self.session, steps)
        return run_in_subprocess(self.session, run) if commands.background else run()

    def _walk_substitution(self, script: Script) -> str | None:
        """Walk the script of a `$( )`. Each costs work again, for it copies the session."""
        self._work.spend(COMMAND + self.session.size)
        return run_in_subprocess(self.session, partial(self.walk_script, script))

    def _walk_pipeline(self, pipeline: Pipeline, outer: Streams) -> tuple[bool | None, str | None]:
        """Walk the commands of a pipeline, each with the output of the one before as its input. A single command runs in the shell
        itself, several run in processes of their own. Return whether the pipeline succeeds, None if nobody knows, and what it prints."""
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
                # The calls of the command before this one feed the calls of this one.
                feeds = tuple(call.call_line() for call in self.calls[start:])
                for position in range(previous_start, start):
                    self.calls[position] = replace(self.calls[position], feeds=feeds)
        return (None if pipeline.unsure else self._success), text

    def _walk_command(self, node: Node, inputs: Streams) -> str | None:
        """Walk a command of any kind. Return what it prints to the standard output, if known."""
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
            printed = walk_for_loop(self.session, node, values, partial(self.walk_script, streams=streams))
        else:
            printed = walk_group(self.session, node, streams, self.walk_script)
        # `break` stops no more than its loop, and `exit` no more than its subshell.
        if isinstance(node, For) or node.kind in ("loop", "subshell"):
            self._may_stop = False
        self._success = None
        return self._note_output(streams, printed)

    def _walk_simple_command(self, node: Simple, inputs: Streams) -> str | None:
        """Walk one program with its assignments and redirections, or assignments or redirections alone. Return what it prints."""
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
            # A value with a blank and a slash may be a command that the shell starts by itself, such as that of PROMPT_COMMAND.
            if any("/" in value and " " in value for _, value in values):
                self.add_call(ProgramCall(program="", tags=self._make_variable_tags(values)))
            # The variable of the environment would later be hidden behind the name that it is assigned to, so it is noted now.
            if self.session.read_variables:
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
        """Walk a call with variables that are set for it alone: `NAME=value program`."""
        used = self.session.read_variables
        names = [assignment.name.partition("[")[0] for assignment, _ in values]
        old_values = {name: self.session.variables.get(name) for name in names}
        self._assign_variables(values)
        self.session.read_variables = used
        try:
            return self.walk_function_or_program(run)
        finally:
            for state in (self.session, *self.session.other_states) if old_values else ():
                state.restore_variables(old_values)

    def _expand_assigned_value(self, assignment: Assignment) -> str:
        """Return the value that is assigned; an array is one text with a mark between its items (`arrays`)."""
        if assignment.index:
            self._expander.expand_to_value(assignment.index)
        if assignment.items is None:
            return self._expander.expand_to_value(assignment.value)
        return join_items(field for word in assignment.items for field in self._expand_fields(word))

    def _make_variable_tags(self, values: list[tuple[Assignment, str]]) -> frozenset[str]:
        """Return the tags of a call for which these variables are set, such as `sets:LD_PRELOAD`."""
        names = [(assignment.name.partition("[")[0], show_field(value)) for assignment, value in values]
        return self.tags | {tag for name, value in names for tag in (f"sets:{name}", f"sets:{name}={value}")}

    def _expand_fields(self, word: Word) -> list[str]:
        """Return the arguments that a word becomes. A process substitution is walked, and becomes a path below `/dev/fd`."""
        if len(word) == 1 and isinstance(word[0], Process):
            # Any path will do that no other substitution has. Bash counts down from 63, too.
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
        """Return the streams of a command behind these redirections, from those that it would have without them."""
        streams = Streams(stdin=inputs.stdin, has_stdin=inputs.has_stdin, sources=inputs.sources)
        for redirect in redirects:
            operator = redirect.operator
            if operator in ("<<", "<<<"):
                text = self._expander.expand_to_value(redirect.target) + "\n" * (operator == "<<<")
                self._note_input(streams, redirect.fd, text)
                continue
            targets = self._expand_fields(redirect.target)
            reads = operator in ("<", "<>", "<&")
            paths = [path for field in targets for path in self.session.resolve_argument(field, follow_copies=reads)]
            descriptor = show_field(targets[0]).rstrip("-") if targets else ""  # `<&3-` also closes 3
            if operator == "<&" and descriptor in self.descriptor_texts:
                self._note_input(streams, redirect.fd, self.descriptor_texts[descriptor])
            if not targets or (operator in ("<&", ">&") and descriptor.isdigit()):
                continue  # no file, but a copy of a descriptor such as `2>&1`
            if reads:
                streams.reads += paths
                self._note_input(streams, redirect.fd, self.session.written_text(paths[0]))
            if operator not in ("<", "<&"):
                self._note_opened_files(redirect, streams, [path for path in paths if path not in DEVICE_FILES])
        return streams

    def _note_input(self, streams: Streams, fd: str, text: str | None) -> None:
        """Keep the text, None if it is not known, that is read from a file descriptor: its number or name; empty for the standard input."""
        if not fd:
            streams.stdin, streams.has_stdin = text, True
            return
        self.descriptor_texts[fd.strip("{}")] = text
        self.session.written[f"/dev/fd/{fd}"] = text

    def _note_opened_files(self, redirect: Redirect, streams: Streams, paths: list[str]) -> None:
        """Keep the files that a redirection opens for writing. What the standard output will write into them is noted later, by
        `_note_output`; of what other streams write, such as errors, the text is never known."""
        streams.writes += paths
        if redirect.operator in (">>", "&>>") and redirect.output:
            streams.appends += paths
        elif redirect.operator in (">", ">|", "&>", ">&") and redirect.output:
            streams.truncates += paths
        elif redirect.operator != "<>":  # another stream than the standard output, such as `2> file`
            note = self.session.record_append if redirect.operator == ">>" else self.session.record_write
            for path in paths:
                note(path, None)

    def _note_redirects_as_cat(self, streams: Streams) -> None:
        """Note the files of redirections that have no program, or belong to a whole group, as those of a call of `cat`."""
        if streams.reads or streams.writes:
            self.add_call(read_call(["cat"], self.session, streams))

    def _note_output(self, streams: Streams, printed: str | None) -> str | None:
        """Record the output of a command in the files that it is redirected to. Return what is left for the standard output: nothing
        if there is such a file."""
        for state in (self.session, *self.session.other_states):
            for path in streams.truncates:
                state.record_write(path, printed)
            for path in streams.appends:
                state.record_append(path, printed)
        return "" if streams.truncates or streams.appends else printed

    def add_call(self, call: ProgramCall) -> None:
        """Note a call, without reads of files that the episode wrote: the rules protect the files of others. Raises:
        UnreadableCommand if there are too many calls."""
        written = self.session.written
        reads = tuple(path for path in call.reads if path not in written)
        if call.program in REMOVERS:
            call = replace(call, writes=tuple(path for path in call.writes if path not in written))
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
        """Walk a call whose name may be that of a function of the shell. Return what it prints, if known. Raises:
        UnreadableCommand."""
        name = run.argv[0]
        if name in self.session.functions and self._active_names.count(name) < MAX_RECURSION:
            return self._walk_function(name, run)
        return self.walk_program(run)

    def walk_program(self, run: ProgramRun) -> str | None:
        """Walk a call as `walk_function_or_program` does, but never a function: a wrapper such as `sudo` starts programs only."""
        if self._wrapper_depth >= MAX_WRAPPED:
            raise UnreadableCommand("too deeply nested")
        self._wrapper_depth += 1
        try:
            return self._walk_by_name(run)
        finally:
            self._wrapper_depth -= 1

    def _walk_by_name(self, run: ProgramRun) -> str | None:
        """Walk a call by the handler of its name, or as a script that the episode wrote, or else as a program that does nothing but
        what its arguments say. Only a builtin of the shell changes the shell itself; all else is a process of its own."""
        name = show_field(run.argv[0]).rpartition("/")[2] if is_fully_known(run.argv[0]) else ""
        if run.streams.has_stdin and not STDIN_NAMES.isdisjoint(map(show_field, run.argv[1:])):
            self.session.written[STDIN_PATH] = run.streams.stdin
        handle = self._handlers.get(name)
        if handle is not None:
            is_builtin = name in BUILTINS and run.argv[0] == name
            return handle(self, run) if is_builtin else run_in_subprocess(self.session, partial(handle, self, run))
        if "/" in run.argv[0] and (text := self.session.written_text(self.session.resolve_path(run.argv[0]))):
            self.note_call(run)
            return run_in_subprocess(self.session, partial(self.walk_file, text, run))
        self.note_call(run)
        return predict_output(run.argv, run.streams.stdin, self.session)

    def note_call(self, run: ProgramRun) -> None:
        """Note the call as its arguments tell. If it writes a file, its `text` is what it would print, where that is known. Raises:
        UnreadableCommand if its arguments are too long for the work that is left."""
        self._work.spend(sum(len(arg) + ARGUMENT + GLOB * has_glob(arg) for arg in run.argv))
        call = read_call(run.argv, self.session, run.streams, run.tags)
        written = run.streams.stdin if call.program == "tee" else None
        if run.streams.writes and written is None:
            written = predict_output(run.argv, run.streams.stdin, self.session)
        self.add_call(replace(call, text=written) if written else call)

    def _walk_function(self, name: str, run: ProgramRun) -> str | None:
        """Walk the body of a function with the call's arguments. A `return` in it ends the function alone."""
        body: Node = self.session.functions[name]  # type: ignore[assignment]
        with self._nested():
            self._active_names.append(name)
            try:
                return self.run_with_arguments(run.argv[1:], partial(self._walk_command, body, run.streams))
            finally:
                self._active_names.pop()
                self._may_stop = False

    def run_with_arguments(self, arguments: list[str], act: Callable[[], str | None]) -> str | None:
        """Run `act` while these are the positional arguments, `$1` and so on. Return its result."""
        old_arguments, self.session.positional = self.session.positional, arguments
        try:
            return act()
        finally:
            for state in (self.session, *self.session.other_states):
                state.positional = old_arguments

    def walk_file(self, text: str, run: ProgramRun) -> str | None:
        """Walk a script file that the episode wrote, in the language that its first line names; else as one of the shell."""
        first_line = text.partition("\n")[0]
        for language in ("python", "perl", "ruby", "node", "php"):
            if language in first_line:
                self.walk_code(language, text, run)
                return None
        return self.run_with_arguments(run.argv[1:], partial(self.walk_text, text, run.streams))

    def make_decoding_tags(self, sources: tuple[str, ...]) -> frozenset[str]:
        """Return the tags for code that was printed by these programs: `decoded` if one of them decodes, also `encoded` if it is one
        that no honest script needs."""
        hidden = frozenset({"decoded"}) if set(sources) & DECODERS else frozenset[str]()
        return hidden | {"encoded"} if set(sources) & HIDERS else hidden

    def walk_code(self, language: str, text: str, run: ProgramRun) -> None:
        """Note what code of another language than the shell's would do, as one call. Then walk code that it evaluates, files of the
        episode that it loads, and commands that it starts. Raises: UnreadableCommand."""
        if self._nesting >= MAX_NESTED or len(text) > MAX_CHARACTERS:
            raise UnreadableCommand("too long or too deeply nested")
        self._work.spend(len(text) * CODE_CHARACTER)
        code = read_python(text) if language == "python" else read_other(language, text)
        self.add_call(read_code_call(language, code, self.session, run.streams, run.tags))
        with self._nested(frozenset({"decoded"} if "decodes" in code.tags else ())):
            for path, file_text in code.files:
                self.session.record_append(self.session.resolve_path(path, follow_copies=False), file_text)
            for nested in code.nested:
                self.walk_code(language, nested, run)
            find_file = self.session.written_module if language in PYTHONS else self.session.written_code_file
            for path, file_text in filter(None, map(find_file, code.loads)):
                if path not in self._active_names:  # modules may import each other
                    self._active_names.append(path)
                    self.walk_code(language, file_text, run)
                    self._active_names.remove(path)
            for started in code.shell:
                run_in_subprocess(self.session, partial(self._walk_started_command, language, started))

    def _walk_started_command(self, language: str, started: Started) -> None:
        """Walk a command that code starts, in the directory that the code gives it."""
        self.session.cwd = self.session.resolve_path(started.cwd)
        if isinstance(started.command, list):
            self.walk_program(ProgramRun(started.command, Streams(), self.tags))
            return
        try:
            self.walk_text(started.command)
        except UnreadableCommand:
            if language == "python":
                raise  # of another language every string is tried as a command, and most are none: those do not matter


def _program_names(calls: list[ProgramCall]) -> list[str]:
    """Return the programs of calls, for `ProgramCall.sources` of what gets their output. A `find` that begins at a root of the system
    is there twice: as `find` and as `find outward`, so that rules can tell it from others."""
    named_calls = [call for call in calls if call.program]
    return [*(c.program for c in named_calls), *(f"{c.program} outward" for c in named_calls if "outward" in c.tags)]
