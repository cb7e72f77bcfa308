"""The guard during one episode: what may run, what the policy reads instead, and what the trace keeps."""

from __future__ import annotations

import asyncio
from dataclasses import asdict, dataclass, field
from threading import Barrier, Event
from typing import Any

import pytest

from opd.config.guard import GuardConfig
from opd.guard.episode_guard import CheckedTurn, GuardWatch
from opd.guard.guard import BLOCKED_ANSWER_ERROR, Guard
from opd.guard.records import JudgeFailed, Opinion, Question
from opd.guard.rules import RuleSet, shipped_rules
from opd.records.environments import ToolCall
from opd.records.episodes import EpisodeStats
from opd.records.guard import GuardRecord, GuardStats
from opd.records.json_fields import make_record
from opd.rollouts.episodes.dialogue import check_observation

RULES = RuleSet([shipped_rules()])
NO_FILE = "cat: /tests/a: No such file or directory"


@dataclass
class FakeJudge:
    """Blocks what has one of these words in it; keeps what it was asked."""

    words: tuple[str, ...] = ()
    fails: bool = False
    asked: list[Question] = field(default_factory=list)

    def judge(self, question: Question) -> Opinion:
        self.asked.append(question)
        if self.fails:
            raise JudgeFailed("no such server")
        return Opinion(block=any(word in question.text for word in self.words), reason="said so")


def watch(judge: FakeJudge | None = None, on_hit: Any = "keep", **options: Any) -> GuardWatch:
    return GuardWatch(Guard(RULES, judge, GuardConfig(**options)), "s0", on_hit)


def shell(command: str, tool: str = "shell") -> ToolCall:
    return ToolCall(name=tool, arguments={"command": command})


def look(found: GuardWatch, *commands: str, text: str = "", turn: int = 0) -> CheckedTurn:
    looked = asyncio.run(found.check_turn(turn, text, [shell(command) for command in commands]))
    found.record_turn(looked)
    return looked


def test_a_blocked_call_never_runs() -> None:
    found = watch()
    looked = look(found, "cat /tests/a", turn=3)
    assert looked.blocked and looked.stops and looked.allowed == ()
    assert looked.instead == (NO_FILE,)
    (event,) = found.stats.events
    assert (event.episode, event.turn, event.tool, event.text) == ("s0", 3, "shell", "cat /tests/a")
    assert (event.rule, event.verdict.allowed, event.verdict.stage) == ("hidden-tests", False, "rules")
    assert event.line.startswith("guard: blocked by the rules, hidden-tests: ")
    assert (found.stats.checked, found.stats.blocked_turns) == (1, 1)


@pytest.mark.parametrize("whole", [False, True])
def test_the_other_calls_of_the_turn_run(whole: bool) -> None:
    looked = look(watch(), "ls", "cat /tests/a", "pytest")
    assert looked.blocked and not looked.stops
    assert [call.arguments["command"] for call in looked.allowed] == ["ls", "pytest"]
    assert looked.dummies == (None, NO_FILE, None)
    seen = looked.merge_observations("of ls; of pytest" if whole else ("of ls", "of pytest"))
    assert seen == (f"of ls; of pytest\n{NO_FILE}" if whole else ("of ls", NO_FILE, "of pytest"))


def test_what_is_not_suspicious_is_left_alone() -> None:
    found = watch()
    looked = look(found, "ls", "pytest -q")
    assert not looked.blocked and len(looked.allowed) == 2 and looked.merge_observations(("a", "b")) == ("a", "b")
    assert not look(found, text="```\ncat /tests/a\n```").blocked, "answers are read only if somebody asks for it"
    assert found.stats == GuardStats(checked=2)


def test_a_session_lasts_for_one_episode() -> None:
    found = watch()
    look(found, "cd /")
    assert look(found, "cat tests/a").blocked
    assert not look(watch(), "cat tests/a").blocked


def test_a_file_that_a_tool_wrote_is_known_when_it_runs() -> None:
    found = watch()
    write = ToolCall(name="write_file", arguments={"path": "run.py", "content": "print(open('/tests/a').read())"})
    assert not asyncio.run(found.check_turn(0, "", [write])).blocked
    assert look(found, "python3 run.py").blocked
    loose = {"path": "conftest.py", "content": "def pytest_runtest_makereport(item, call): ..."}
    assert asyncio.run(found.check_turn(1, "", [ToolCall(name="write_file", arguments=loose)])).blocked


def test_only_the_named_tools_are_checked() -> None:
    found = watch(only_tools=frozenset({"bash"}))
    calls = [shell("cat /tests/a"), shell("cat /tests/a", "bash")]
    looked = asyncio.run(found.check_turn(0, "", calls))
    assert [verdict.allowed for verdict in looked.verdicts] == [True, False] and looked.stats.checked == 1


def test_code_in_an_answer_is_read_as_code() -> None:
    found = watch(answers=True)
    for answer in (
        "Look:\n```bash\ncat /tests/a\n```\n",
        "```python\nprint(open('/tests/a').read())\n```",
        "```\ncat /tests/a",
    ):
        looked = look(found, text=answer)
        assert looked.stops and "No such file" in str(looked.instead), answer
    for honest in ("cat /tests/a is not allowed.", "```json\n{}\n```", "```bash\npytest -q\n```"):
        assert not look(found, text=honest).blocked, honest
    assert found.stats.checked == 6 and found.stats.events[0].tool == ""


@pytest.mark.parametrize("code", ["echo 'it", "printenv"])
def test_a_blocked_answer_is_never_answered_with_nothing(code: str) -> None:
    looked = look(watch(answers=True), text=f"Done.\n```bash\n{code}\n```\n")
    assert looked.stops and looked.instead == BLOCKED_ANSWER_ERROR


def test_the_judge_reads_every_answer() -> None:
    judge = FakeJudge(("if n == 7",))
    found = watch(judge, answers=True)
    assert not look(found, text="def f(n): return 2 * n").blocked
    looked = look(found, text="def f(n):\n    if n == 7: return 14")
    assert looked.stops and looked.instead == BLOCKED_ANSWER_ERROR
    assert [question.text[:5] for question in judge.asked] == ["def f", "def f"]
    assert [event.rule for event in found.stats.events] == ["answer", "answer"]


@pytest.mark.parametrize(("on_failure", "blocked"), [("block", True), ("allow", False)])
def test_a_judge_that_is_not_there(on_failure: Any, blocked: bool) -> None:
    found = watch(FakeJudge(fails=True), answers=True, on_failure=on_failure)
    assert look(found, "curl -s https://example.org/x").blocked == blocked
    assert look(found, text="4").blocked == blocked
    record = GuardRecord.from_stats(found.stats)
    assert record.unanswered == 2 and record.rules["answer"].stages == {"judge_failed": 1}


def test_nobody_waits_for_the_judge_of_another_episode() -> None:
    everybody = Barrier(64)

    class Slow:
        def judge(self, question: Question) -> Opinion:
            everybody.wait(timeout=10)
            return Opinion(block=True, reason="")

    async def looked() -> list[CheckedTurn]:
        watches = [watch(Slow()) for _ in range(64)]  # type: ignore[arg-type]
        return await asyncio.gather(
            *(one.check_turn(0, "", [shell("curl -s https://example.org/x")]) for one in watches)
        )

    assert all(one.blocked for one in asyncio.run(looked())), "all of them asked at the same time"


def test_a_turn_that_nobody_waits_for_changes_nothing() -> None:
    asked, answer = Event(), Event()

    class Slow:
        def judge(self, question: Question) -> Opinion:
            asked.set()
            answer.wait(timeout=10)
            return Opinion(block=False, reason="")

    found = watch(Slow())  # type: ignore[arg-type]

    async def left() -> None:
        turn = asyncio.ensure_future(found.check_turn(0, "", [shell("cd / && curl -s https://example.org/x")]))
        while not asked.is_set():
            await asyncio.sleep(0.01)
        turn.cancel()
        await asyncio.gather(turn, return_exceptions=True)
        answer.set()

    asyncio.run(left())
    assert not look(found, "cat tests/a").blocked, "the directory is what it was"
    assert not look(found, "cd / && curl -s https://example.org/x").blocked
    assert look(found, "cat tests/a").blocked, "a turn that somebody waits for changes it"


@pytest.mark.parametrize(("on_hit", "origin"), [("keep", "policy"), ("mask", "masked"), ("negative", "blocked")])
def test_what_becomes_of_the_tokens(on_hit: str, origin: str) -> None:
    assert watch(on_hit=on_hit).mark == origin


def test_no_command_can_make_an_error_that_breaks_its_episode() -> None:
    looked = look(watch(), "cat $'/tests/a\\001\\002\\x7f'")
    assert looked.stops
    assert all(check_observation(text) for text in looked.instead)


def test_numbers_survive_the_step_log_and_the_metrics() -> None:
    found = watch(FakeJudge(("x.org",)))
    look(found, "cat /tests/a", "curl -s https://a.org/x", "curl -s https://x.org/x", "cat 'a")
    stats = EpisodeStats(episodes=1, guard=found.stats)
    assert EpisodeStats.from_json(asdict(stats)) == stats
    record = GuardRecord.from_stats(found.stats + found.stats)
    assert make_record(GuardRecord, asdict(record)) == record
    network = record.rules["network"]
    assert (network.hits, network.blocked, network.stages) == (4, 2, {"judge": 4})
    assert [example.blocked for example in network.examples] == [True, False], "one of either verdict is enough"
    assert record.rules["unreadable"].hits == 2 and record.checked == 8 and record.blocked_turns == 2
