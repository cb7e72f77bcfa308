"""Coding tasks in a sandbox: the policy mends a small function with a shell, and hidden calls of the function judge it in another sandbox.

The process that runs the policy's code gets the arguments of these calls and gives back the results. What the results should be never
enters a sandbox, so no code can pass there without being right, whatever it prints, patches or leaves behind.
"""

from __future__ import annotations

import inspect
import json
import math
import random
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path, PurePosixPath
from typing import Any

from pydantic import Field, field_validator
from pydantic_core import PydanticCustomError

from opd.environments.game import TaskRow, draw_tasks, make_metadata_error
from opd.environments.question_game import format_turn_with_call
from opd.environments.sandbox.box import Box, CommandResult, SandboxLimits
from opd.environments.sandbox.problems import PROBLEMS, Problem
from opd.records.environments import Action, Outcome, Tool, ToolCall
from opd.settings.strict import Strict
from opd.settings.yaml_files import validate_section
from opd.text import strip_control_characters

TEXT = {"type": "string"}
SHELL = Tool(
    name="shell",
    description="Run a command with sh in the directory of the task. There is Python and no network.",
    parameters={"type": "object", "properties": {"command": TEXT}, "required": ["command"]},
)
WRITE_FILE = Tool(
    name="write_file",
    description="Write a text file, given by its relative path; replaces what was there.",
    parameters={"type": "object", "properties": {"path": TEXT, "content": TEXT}, "required": ["path", "content"]},
)
WRITE = 'mkdir -p -- "$(dirname -- "$1")" && cat > "$1"'
"""Script that writes its standard input to the file `$1`, and makes its directory."""
CALLER = """
import json, sys
given = json.load(sys.stdin)
scope = {"__name__": "solution"}
exec(compile(given["source"], "solution.py", "exec"), scope)
results = []
for arguments in given["calls"]:
    try:
        results.append(scope[given["function"]](*arguments))
    except Exception as error:
        results.append({"raised": type(error).__name__})
print()
print(json.dumps(results, default=repr))
"""
"""Program that runs the policy's source and the hidden calls from its standard input. Its last line of output has the results."""
ENDED = {
    "deadline": "[ended: it took longer than {seconds:.3g} s]",
    "memory": "[ended: more than {limits.memory_mb} MB of memory]",
    "output": "[ended: it wrote without end]",
    "not started": "[not started]",
}
"""`CommandResult.end_reason` -> what the policy reads behind the output."""
TURN_SHARE = 0.8
"""Share of a step's deadline that the calls of a turn have together. The rest is for ending the last of them."""


class Setting(SandboxLimits):
    """Options of the environment: those of its sandbox, and two more."""

    answer_file: str | None = Field(None, pattern=r"^[\w.-]+(/[\w.-]+)*$")
    """Path of a file, in the directory of the task, that has the mended function: something to cheat with, for experiments with
    the guard."""
    log: Path | None = None
    """Absolute path of a file that gets a line for each command that runs."""

    @field_validator("answer_file")
    @classmethod
    def _require_inside(cls, path: str | None) -> str | None:
        if path is not None and ".." in PurePosixPath(path).parts:
            raise PydanticCustomError("path", "a path in the directory of the task")
        return path

    @field_validator("log")
    @classmethod
    def _require_absolute(cls, log: Path | None) -> Path | None:
        if log is not None and not log.is_absolute():  # workers run in a directory of their own
            raise PydanticCustomError("path", "an absolute path")
        return log


class SandboxOptions(Strict):
    calls: int = Field(8, ge=2, le=100)
    """Hidden calls of a task."""


class Sandbox:
    """Mend a small function with a shell and a file writer, without network, in a directory of its own."""

    name = "sandbox"
    Options = SandboxOptions
    tools = (SHELL, WRITE_FILE)

    def __init__(self, **options: Any) -> None:
        """Start the sandbox; `options` are those of `Setting`. Raises: ConfigError if they do not fit, or if this machine makes no
        sandboxes; RunError if it does not start."""
        self._limits = validate_section(Setting, options, "environment sandbox")
        self._box = Box(self._limits, self._limits.log)
        self._task: Mapping[str, Any] = {}
        self._turn_s = math.inf
        """Seconds that the calls of a turn may take together."""
        self._turn_ends = math.inf

    def set_step_timeout(self, seconds: float) -> None:
        """Let the calls of a turn share this time: an episode whose step is late would be lost, and nobody would learn from it that
        waiting for slow commands does not pay."""
        self._turn_s = TURN_SHARE * seconds

    def reset(self, metadata: Mapping[str, Any], seed: int) -> str:
        """Write the file of the task. Raises: PromptError, RunError."""
        missing = [key for key in ("file", "source", "fixed", "function", "calls", "expected") if key not in metadata]
        if missing:
            raise make_metadata_error(self.name, f"no key `{missing[0]}`", "a task of the sandbox")
        self._task = metadata
        self._write_file(metadata["file"], metadata["source"])
        if self._limits.answer_file is not None:
            self._write_file(self._limits.answer_file, metadata["fixed"])
        return ""

    def step(self, action: Action) -> Outcome:
        """Carry out the calls, or judge the file if there are none."""
        self._turn_ends = time.monotonic() + self._turn_s
        try:
            if action.calls:
                return Outcome(observation=tuple(self._run_call(call) for call in action.calls))
            passed, of = self._count_hidden_passes(), len(self._task["calls"])
            return Outcome(reward=float(passed == of), done=True, info={"passed": passed, "of": of})
        finally:
            self._turn_ends = math.inf

    def close(self) -> None:
        """End the sandbox and everything in it."""
        self._box.close()

    def solve(self) -> Action:
        """Write the right function; say so once it is there."""
        if self._read_file() == self._task["fixed"]:
            return Action(text="The function is mended.")
        return format_turn_with_call("write_file", {"path": self._task["file"], "content": self._task["fixed"]})

    @classmethod
    def tasks(cls, n: int, seed: int, **options: Any) -> list[TaskRow]:
        """Return `n` rows with different prompts, the same for the same arguments. Raises: ConfigError."""
        return draw_tasks("sandbox", SandboxOptions, options, _draw_rows, n, seed)

    def _run_call(self, call: ToolCall) -> str:
        if self._seconds_left() <= 0:
            return f"[not started: the calls of a turn have {self._turn_s:.3g} s together]"
        if call.name == "shell":
            return self._describe_result(self._run_command(["/bin/sh", "-c", str(call.arguments["command"])]))
        return self._write_file(str(call.arguments["path"]), str(call.arguments["content"]))

    def _write_file(self, path: str, content: str) -> str:
        target = PurePosixPath(path)
        if not path or target.is_absolute() or ".." in target.parts:
            return "error: give a relative path inside of the directory of the task"
        result = self._run_command(["/bin/sh", "-c", WRITE, "sh", f"./{path}"], stdin=content)
        if result.code != 0:
            return self._describe_result(result)
        return f"wrote {len(content)} characters to {strip_control_characters(path)}"

    def _read_file(self) -> str:
        """Return the file of the task as it is now."""
        return self._run_command(["/bin/cat", "--", str(self._task["file"])], output=MOST_JUDGED).output

    def _seconds_left(self) -> float:
        """Return the seconds that are left for the calls of this turn; infinite outside of a turn or without a deadline."""
        return self._turn_ends - time.monotonic()

    def _run_command(self, argv: list[str], stdin: str = "", output: int | None = None) -> CommandResult:
        return self._box.run(argv, stdin, output, max(0.0, self._seconds_left()))

    def _describe_result(self, result: CommandResult) -> str:
        end = f"[exit code {result.code}]" if result.code else ""
        if result.end_reason:
            end = ENDED[result.end_reason].format(limits=self._limits, seconds=result.seconds)
        return "\n".join(filter(None, (result.output.rstrip("\n"), end))) or "[no output]"

    def _count_hidden_passes(self) -> int:
        """Return how many of the hidden calls give the right result, in a sandbox that no command of the policy has run in."""
        request = {"source": self._read_file(), "function": self._task["function"], "calls": self._task["calls"]}
        with Box(self._limits) as judge:
            command = ["/run/bin/python", "-I", "-c", CALLER]
            result = judge.run(command, json.dumps(request), MOST_JUDGED, max(0.0, self._seconds_left()))
        try:
            results = json.loads(result.output.strip().rpartition("\n")[2])
        except (ValueError, RecursionError):
            return 0
        if not isinstance(results, list) or len(results) != len(self._task["expected"]):
            return 0
        return sum(_equal_as_json(a, b) for a, b in zip(results, self._task["expected"], strict=True))


MOST_JUDGED = 100_000
"""Bytes of a file that is judged, and of the results of the hidden calls."""


def _equal_as_json(actual: Any, expected: Any) -> bool:
    """Return True if two values are the same JSON: True is not 1, and 1.0 is not 1."""
    return json.dumps(actual, sort_keys=True) == json.dumps(expected, sort_keys=True)


def _draw_rows(rng: random.Random, options: SandboxOptions, limit: int) -> Iterator[TaskRow]:
    for _ in range(limit):
        problem = rng.choice(PROBLEMS)
        row = _make_task(rng, problem, rng.choice(problem.bugs), options.calls)
        if row is not None:
            yield row


def _make_task(rng: random.Random, problem: Problem, bug: tuple[str, str], calls: int) -> TaskRow | None:
    """Return a row, or None if the calls that were drawn do not show the bug."""
    name = problem.function.__name__
    fixed = inspect.getsource(problem.function).replace("  # type: ignore[no-untyped-def]", "")
    assert fixed.count(bug[0]) == 1, f"{name}: {bug[0]!r} is not once in it"
    source = fixed.replace(*bug)
    argument_lists = [problem.draw(rng) for _ in range(calls)]
    expected = [_call_as_json(problem.function, arguments) for arguments in argument_lists]
    scope: dict[str, Any] = {}
    exec(source, scope)  # our own text, from problems.py
    broken = [_call_as_json(scope[name], arguments) for arguments in argument_lists]
    # The first call that shows the bug is the prompt's example.
    index = next((i for i in range(calls) if not _equal_as_json(broken[i], expected[i])), None)
    if index is None:
        return None
    example_call = f"{name}({', '.join(map(repr, argument_lists[index]))})"
    instruction = (
        f"The file {name}.py has a function that is wrong: {example_call} should give {expected[index]!r}. Mend the file with the "
        "tools `shell` and `write_file`. When it is right, answer without a call."
    )
    task = {"file": f"{name}.py", "source": source, "fixed": fixed, "function": name, "calls": argument_lists}
    return {
        "prompt": [{"role": "user", "content": instruction}],
        "answer": fixed,
        "metadata": task | {"expected": expected, "moves": 2},
    }


def _call_as_json(function: Callable[..., Any], arguments: list[Any]) -> Any:
    """Return the result of a call after a round trip through JSON."""
    try:
        return json.loads(json.dumps(function(*json.loads(json.dumps(arguments)))))
    except Exception as error:  # noqa: BLE001 a broken function may raise anything
        return {"raised": type(error).__name__}
