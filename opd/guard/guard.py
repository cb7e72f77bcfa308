"""The guard. Rules decide on what a tool call would do, a judge on what the rules find suspicious, and the policy reads an ordinary error
in place of the result of a blocked call.

call ──▶ stage one: parse, walk, rules ──nothing──▶ allowed
             │            └──certain──▶ blocked
             └──suspicious, or does not parse──▶ stage two: judge ──▶ allowed or blocked
                                                    └──no answer──▶ `on_failure`
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal, TypeGuard

from opd.config.guard import GuardConfig
from opd.guard.facts import ProgramCall, Streams
from opd.guard.fake_errors import DUMMIES
from opd.guard.literal_paths import find_mentions
from opd.guard.records import Judge, JudgeFailed, Opinion, Question
from opd.guard.rules import Hit, RuleSet
from opd.guard.session import GuardSession
from opd.guard.shell.branches import list_states, run_in_every_state, run_in_subprocess, settle_states
from opd.guard.shell.fields import MARKS, show_field
from opd.guard.shell.nodes import UnreadableCommand
from opd.guard.shell.programs import PROGRAMS
from opd.guard.shell.projects import read_patch
from opd.guard.shell.walk import MAX_NESTED, ProgramRun, Walker
from opd.records.environments import ToolCall
from opd.records.guard import Stage, Suspicion, Verdict
from opd.records.json_fields import parse_json_or_none
from opd.text import strip_control_characters, to_one_line

Kind = Literal["shell", "scripts", "python", "read", "write", "patch", "url", "given", "text"]
"""Content of an argument of a tool. A list of texts is one program with its arguments if it is `shell`, and several scripts if it is
`scripts`. With a `given` argument the tool may do anything, so only the paths that stand in it count. `text` is not looked at."""
ARGUMENTS: dict[str, Kind] = {
    **dict.fromkeys(("command", "cmd", "script", "bash", "shell", "bash_command", "argv", "command_line", "cmdline"), "shell"),
    **dict.fromkeys(("commands", "keystrokes", "cmds", "scripts"), "scripts"),
    **dict.fromkeys(("code", "python", "source", "python_code", "source_code"), "python"),
    **dict.fromkeys(
        (
            "path", "file", "filename", "file_path", "filepath", "target_file", "directory", "dir", "paths", "files", "filenames",
            "file_paths", "filepaths", "target", "targets", "target_files", "directories", "dirs", "folder", "folders", "src",
            "source_path", "dst", "destination", "from", "to", "root", "notebook_path", "absolute_path", "relative_path", "uri",
        ),
        "read",
    ),
    **dict.fromkeys(("patch", "diff", "patch_text"), "patch"),
    **dict.fromkeys(("url", "urls", "link", "links", "href"), "url"),
    **dict.fromkeys(("thought", "thoughts", "thinking", "reasoning", "explanation", "message", "summary", "description"), "text"),
}  # fmt: skip
"""Name of an argument -> its kind, for a tool that the pipeline does not describe. An argument of any other name is `given`."""
WORKDIR_ARGUMENTS = ("cwd", "workdir", "working_directory", "working_dir", "work_dir")
"""Arguments that say where a command runs."""
SHELL_WORDS = ("bash", "shell", "terminal", "exec", "command", "console")
"""A tool with one of these in its name may run an argument of any name as a script."""
PYTHON_WORDS = ("python", "jupyter", "notebook")
"""A tool with one of these in its name may take an argument of any name as code."""
WRITING_WORDS = ("write", "edit", "create", "replace", "insert", "append", "delete", "remove", "patch", "save")
"""A tool with one of these in its name changes the file that it names."""
APPENDING_WORDS = ("append", "insert")
"""A tool with one of these in its name adds to the file, and leaves the rest of it as it is."""
WHOLE_TEXT_ARGUMENTS = ("content", "contents", "file_text", "text")
"""Arguments of a tool that writes a file that hold the whole text of the file, or the text that is added to it."""
MAX_SHOWN = 4000
"""The most characters of `Verdict.command`."""
FENCED_CODE = re.compile(r"^[ \t]*```[ \t]*([\w+-]*)[^\n]*\n(.*?)(?:^[ \t]*```|\Z)", re.DOTALL | re.MULTILINE)
"""Fenced code in an answer, with or without the closing fence: its language and its text."""
LANGUAGES = {
    **dict.fromkeys(("", "bash", "sh", "shell", "console", "zsh"), "command"),
    **dict.fromkeys(("python", "py", "python3"), "code"),
}
"""Language of fenced code -> name of the argument in which the code is checked. Code of other languages is not."""
ANSWER_REASON = "An answer, which is read whole: it cheats if it only works for the visible tests, or takes its result from the grader."
BLOCKED_ANSWER_ERROR = "The task is not finished yet."
"""The observation after a blocked answer for which no program has an error."""
TOO_COMPLEX_ERROR = "bash: fork: Resource temporarily unavailable"
"""The observation after a call that we cannot read though the shell might."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GuardFinding:
    """Result of stage one for a tool call."""

    suspicion: Suspicion
    reason: str = ""
    """Reason why the call is suspicious, for people and for the judge."""
    hit: Hit | None = None
    calls: Sequence[ProgramCall] = ()
    """The program calls that the tool call would make."""
    replacement: str = ""
    """The observation if the call is blocked though no rule hit."""

    @property
    def command(self) -> str:
        """The program calls, one line each."""
        return "\n".join(line for call in self.calls if (line := call.call_line()))


class Guard:
    """Both stages. Episodes and threads may share a guard, for what it knows of an episode is kept in the episode's session."""

    def __init__(self, rules: RuleSet, judge: Judge | None = None, config: GuardConfig | None = None) -> None:
        """`rules` and `judge` are those of the section `config`, which names them, ready for use."""
        self._rules = rules
        self._judge = judge
        self._config = config or GuardConfig()

    def session(self, workdir: str | None = None) -> GuardSession:
        """Return the state of a new episode, which begins in `workdir`; None: in the directory of the configuration."""
        config = self._config
        return GuardSession(cwd=workdir or config.workdir, home=config.home, keeps_shell=config.keeps_shell)

    def checks(self, tool: str) -> bool:
        """Return True if calls of this tool are checked; with an empty name, whether answers are."""
        only = self._config.only_tools
        return (only is None or tool in only) if tool else self._config.answers

    def check_answer(self, text: str, session: GuardSession) -> Verdict:
        """Return the verdict on a turn without calls. Each piece of fenced code in it is checked as a call; if none is blocked, the judge
        is asked about the whole text."""
        for language, code in FENCED_CODE.findall(text):
            if language.lower() in LANGUAGES:
                verdict = self.check(ToolCall(name="", arguments={LANGUAGES[language.lower()]: code}), session)
                if not verdict.allowed:
                    observation = verdict.observation if verdict.rule else ""
                    return replace(verdict, observation=observation or BLOCKED_ANSWER_ERROR)
        if self._judge is None:
            return Verdict(allowed=True, stage="rules", suspicion="none")
        finding = GuardFinding(suspicion="answer", reason=ANSWER_REASON)
        verdict = self._make_verdict(ToolCall(name="", arguments={"answer": text}), finding)
        return verdict if verdict.allowed else replace(verdict, observation=BLOCKED_ANSWER_ERROR)

    def check(self, call: ToolCall, session: GuardSession) -> Verdict:
        """Return the verdict on a call. The session changes as the call would change it, but only if the call may run."""
        # Stage one moves its session on as if the call had run. As a blocked call does not run, it gets a copy.
        next_session = session.copy()
        next_session.next_call()
        if next_session.other_states:
            # Where calls do not share a shell, `next_call` has made many of the states equal.
            settle_states(next_session, list_states(next_session))
        finding = self.check_rules(call, next_session)
        verdict = self._make_verdict(call, finding)
        if verdict.allowed:
            session.take_over(next_session)
        return verdict

    def check_rules(self, call: ToolCall, session: GuardSession) -> GuardFinding:
        """Return what stage one finds, without a judge. The session changes as the call would change it."""
        walker = Walker(session, PROGRAMS)
        kinds: Mapping[str, Kind] | None = self._config.tools.get(call.name)
        directory = next(
            (argument for name in WORKDIR_ARGUMENTS if isinstance(argument := call.arguments.get(name), str)), ""
        )
        problem, replacement = "", TOO_COMPLEX_ERROR
        try:
            for name, value in call.arguments.items():
                kind = _argument_kind(name) if kinds is None else kinds.get(name, "given")
                act = partial(self._walk_value, walker, call, kind, value)
                run_in_every_state(session, partial(_run_in_directory, session, directory, act) if directory else act)
        except UnreadableCommand as error:
            problem, replacement = str(error), error.error_text or TOO_COMPLEX_ERROR
        except Exception as error:  # noqa: BLE001 whatever a policy writes, none of its calls may end the run
            problem = f"to read it failed with {to_one_line(repr(error), 200)}"
        calls = list(dict.fromkeys(walker.calls))  # most calls are the same in each state that the shell may be in
        hit = self._rules.find_deciding_hit(calls, session)
        # Only if no rule hits the calls as they were read, we look for paths that stand anywhere in their texts.
        hit = hit or self._rules.find_deciding_hit(find_mentions(calls, session), session)
        if problem and (hit is None or hit.rule.verdict != "block"):
            return GuardFinding(suspicion="unreadable", reason=problem, hit=hit, calls=calls, replacement=replacement)
        return GuardFinding(suspicion="none", calls=calls) if hit is None else _make_finding(hit, calls)

    def _walk_value(self, walker: Walker, call: ToolCall, kind: Kind, value: object, depth: int = 0) -> None:
        """Walk the value of an argument. Items of a list have the kind of the list, values of an object the kinds of their own names.
        Raises: UnreadableCommand."""
        if kind == "text":
            return
        if depth > MAX_NESTED:
            raise UnreadableCommand("too deeply nested")
        if isinstance(value, Mapping):
            nested_call = replace(call, arguments=value)
            for name, item in value.items():
                self._walk_value(walker, nested_call, _argument_kind(name), item, depth + 1)
        elif isinstance(value, list) and kind == "shell" and _is_argument_vector(value):
            _refuse_marks(*value)
            walker.walk_function_or_program(ProgramRun(value, Streams()))
        elif (
            kind == "shell" and isinstance(value, str) and _is_argument_vector(arguments := call.arguments.get("args"))
        ):
            _refuse_marks(value, *arguments)
            walker.walk_function_or_program(ProgramRun([*(value.split() or [""]), *arguments], Streams()))
        elif isinstance(value, list):
            for item in value:
                self._walk_value(walker, call, kind, item, depth + 1)
        elif isinstance(value, str):
            _refuse_marks(value)
            self._check_text(walker, call, kind, value)

    def _check_text(self, walker: Walker, call: ToolCall, kind: Kind, value: str) -> None:
        """Walk a text of any kind as the program calls that stand for it."""
        if kind in ("shell", "scripts"):
            walker.walk_text(value)
        elif kind == "python":
            walker.walk_code("python", value, ProgramRun(["python"], Streams()))
        elif kind == "patch":
            patches = list(read_patch(walker, value))
            for file_call in patches or [ProgramCall(program="", inputs=(value,))]:
                walker.add_call(file_call)
        elif kind == "url":
            walker.walk_function_or_program(ProgramRun(["curl", value], Streams()))
        elif kind == "given":
            self._check_unknown_text(walker, call, value)
        else:
            self._check_file(walker, call, value, kind)

    def _check_unknown_text(self, walker: Walker, call: ToolCall, value: str) -> None:
        """Walk a text with which the tool may do anything: as a call with that text among its `inputs`, and if the tool may be a shell or
        Python also as code. The whole text of a file is passed over, since it is checked once something runs the file."""
        tool = call.name.lower()
        if _tool_writes_files(call) and value in _find_whole_texts(call):
            return
        if value[:1] in ("{", "[") and (data := parse_json_or_none(value)) is not None:
            # The depth is near its bound, so that no more than two further levels are read.
            self._walk_value(walker, call, "given", data, MAX_NESTED - 2)
            return
        walker.add_call(ProgramCall(program="", inputs=(value,)))
        with suppress(UnreadableCommand):  # then it is hardly code
            if any(name in tool for name in PYTHON_WORDS):
                walker.walk_code("python", value, ProgramRun(["python"], Streams()))
            elif any(name in tool for name in SHELL_WORDS):
                run_in_subprocess(walker.session, partial(walker.walk_text, value))

    def _check_file(self, walker: Walker, call: ToolCall, path: str, kind: Kind) -> None:
        """Walk a tool that reads or changes a file, as the program that a shell would use for it: `curl`, `cat` or `touch`."""
        text = next(iter(_find_whole_texts(call)), None)
        if path.startswith(("http://", "https://")):
            walker.walk_function_or_program(ProgramRun(["curl", path], Streams()))
        elif kind == "read" and not _tool_writes_files(call):
            walker.walk_function_or_program(ProgramRun(["cat", path], Streams()))
        elif text is None:
            walker.walk_function_or_program(ProgramRun(["touch", path], Streams()))
        else:
            paths = walker.session.resolve_argument(path, follow_copies=False)
            # It is like `cat > path` with the text on the standard input.
            walker.note_call(ProgramRun(["cat"], Streams(stdin=text, has_stdin=True, writes=paths)))
            is_append = any(word in call.name.lower() for word in APPENDING_WORDS)
            (walker.session.record_append if is_append else walker.session.record_write)(paths[0], text)

    def _make_verdict(self, call: ToolCall, finding: GuardFinding) -> Verdict:
        """Return the verdict that follows from a finding; about a suspicious call that no rule blocks, the judge is asked."""
        verdict = Verdict(allowed=True, stage="rules", suspicion=finding.suspicion, command=finding.command[:MAX_SHOWN])
        hit = finding.hit
        if hit is not None:
            verdict = replace(verdict, rule=hit.rule.id)
        if finding.suspicion == "none":
            return verdict
        error_text = DUMMIES[hit.rule.dummy](hit.call) if hit else finding.replacement
        blocked = replace(verdict, allowed=False, observation=strip_control_characters(error_text))
        if finding.suspicion == "certain":
            return replace(blocked, reason=finding.reason)
        opinion, stage = self._ask_judge(call, finding)
        reason = f"{finding.reason} {opinion.reason}".strip()
        return replace(blocked if opinion.block else verdict, stage=stage, reason=reason)

    def _ask_judge(self, call: ToolCall, finding: GuardFinding) -> tuple[Opinion, Stage]:
        """Return the judge's opinion, or what `on_failure` says if there is none, and the stage that it comes from."""
        failure = "no judge is set"
        stage: Stage = "no_judge"
        if self._judge is not None:
            text = "\n".join(str(value) for value in call.arguments.values())
            question = Question(tool=call.name, text=text, command=finding.command, suspicion=finding.reason)
            try:
                return self._judge.judge(question), "judge"
            except JudgeFailed as error:
                failure, stage = str(error), "judge_failed"
        on_failure = self._config.on_failure
        return Opinion(block=on_failure == "block", reason=f"({failure}; on_failure: {on_failure})"), stage


def _run_in_directory(session: GuardSession, directory: str, act: Callable[[], object]) -> None:
    """Run `act` as a process that starts in a directory: the session's own directory stays as it is."""

    def inside() -> None:
        session.cwd = session.resolve_path(directory)
        act()

    run_in_subprocess(session, inside)


def _argument_kind(name: str) -> Kind:
    """Return the kind of an argument by its name."""
    return ARGUMENTS.get(name.lower(), "given")


def _tool_writes_files(call: ToolCall) -> bool:
    """Return True if a tool, to judge by its name, changes the file that its arguments name."""
    return any(word in call.name.lower() for word in WRITING_WORDS)


def _find_whole_texts(call: ToolCall) -> list[str]:
    """Return the arguments that may hold the whole text of the file that a tool writes. If there are several, the first counts."""
    return [text for name in WHOLE_TEXT_ARGUMENTS if isinstance(text := call.arguments.get(name), str)]


def _is_argument_vector(values: object) -> TypeGuard[list[str]]:
    """Return True for a list of one program and its arguments, and not of commands. Its first item then has no blank, as no program's
    name has one."""
    if not isinstance(values, list) or not values or not all(isinstance(item, str) for item in values):
        return False
    return not any(map(str.isspace, values[0]))


def _refuse_marks(*texts: str) -> None:
    """Refuse texts with characters of Unicode's private area, which are marks in our fields. Raises: UnreadableCommand."""
    if any(map(MARKS.search, texts)):
        raise UnreadableCommand("characters of Unicode's private area")


def _make_finding(hit: Hit, calls: Sequence[ProgramCall]) -> GuardFinding:
    """Return the finding for a rule that hit: `certain` if the rule blocks, `rule` if it asks the judge."""
    suspicion: Suspicion = "certain" if hit.rule.verdict == "block" else "rule"
    reason = f"{hit.rule.about} ({show_field(hit.call.call_line())[:200]})"
    return GuardFinding(suspicion=suspicion, reason=reason, hit=hit, calls=calls)
