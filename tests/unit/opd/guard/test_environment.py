"""An environment behind the guard: blocked calls never reach it, and the policy cannot tell."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from opd.environments.records import Action, Outcome, Tool, ToolCall
from opd.guard.environment import GuardedEnvironment
from opd.guard.guard import Guard
from opd.guard.rules import RuleSet, shipped_rules

GUARD = Guard(RuleSet([shipped_rules()]))
SECRET = "the answer is 42"


class Shell:
    """Keeps what ran. Every file holds the secret."""

    def __init__(self, whole: bool = False) -> None:
        self.ran: list[str] = []
        self.closed = 0
        self._whole = whole

    @property
    def tools(self) -> tuple[Tool, ...]:
        return (Tool(name="shell", description=""),)

    def reset(self, metadata: Mapping[str, Any], seed: int) -> str:
        return f"{metadata} {seed}"

    def step(self, action: Action) -> Outcome:
        self.ran += [call.arguments["command"] for call in action.calls]
        texts = tuple(f"{call.arguments['command']}: {SECRET}" for call in action.calls)
        return Outcome(observation="; ".join(texts) if self._whole else texts, reward=1.0, info={"own": 1})

    def close(self) -> None:
        self.closed += 1


def act(*commands: str) -> Action:
    calls = tuple(ToolCall(name="shell", arguments={"command": command}) for command in commands)
    return Action(text="\n".join(commands), calls=calls)


def test_a_blocked_call_never_runs() -> None:
    shell = Shell()
    outcome = GuardedEnvironment(shell, GUARD).step(act("cat /tests/a"))
    assert shell.ran == []
    assert outcome.observation == ("cat: /tests/a: No such file or directory",)
    assert (outcome.reward, outcome.done) == (None, False)
    (noted,) = outcome.info["guard"]
    assert (noted["rule"], noted["allowed"]) == ("hidden-tests", False)


@pytest.mark.parametrize("whole", [False, True])
def test_the_other_calls_of_the_turn_run(whole: bool) -> None:
    shell = Shell(whole)
    outcome = GuardedEnvironment(shell, GUARD).step(act("ls", "cat /tests/a", "pytest"))
    assert shell.ran == ["ls", "pytest"]
    seen = outcome.observation
    if whole:
        assert seen == f"ls: {SECRET}; pytest: {SECRET}\ncat: /tests/a: No such file or directory"
    else:
        assert seen == (f"ls: {SECRET}", "cat: /tests/a: No such file or directory", f"pytest: {SECRET}")
    assert outcome.reward == 1.0 and outcome.info["own"] == 1


def test_what_is_not_suspicious_is_left_alone() -> None:
    shell = Shell()
    guarded = GuardedEnvironment(shell, GUARD)
    assert guarded.step(act("ls")) == Shell().step(act("ls"))
    assert guarded.step(Action(text="no call")) == Outcome(observation=(), reward=1.0, info={"own": 1})
    assert (guarded.tools, guarded.reset({"a": 1}, 7)) == (shell.tools, "{'a': 1} 7")
    guarded.close()
    assert shell.closed == 1


def test_a_session_lasts_for_one_episode() -> None:
    guarded = GuardedEnvironment(Shell(), GUARD)
    guarded.step(act("cd /"))
    assert "guard" in guarded.step(act("cat tests/a")).info
    guarded.reset({}, 0)
    assert "guard" not in guarded.step(act("cat tests/a")).info


def test_a_file_that_a_tool_wrote_is_known_when_it_runs() -> None:
    session = GUARD.session()
    write = ToolCall(name="write_file", arguments={"path": "run.py", "content": "print(open('/tests/a').read())"})
    assert GUARD.check(write, session).allowed
    assert not GUARD.check(ToolCall(name="shell", arguments={"command": "python3 run.py"}), session).allowed
    loose = {"path": "conftest.py", "content": "def pytest_runtest_makereport(item, call): ..."}
    assert not GUARD.check(ToolCall(name="write_file", arguments=loose), session).allowed
