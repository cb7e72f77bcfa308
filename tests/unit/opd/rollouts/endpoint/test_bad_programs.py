"""Odd words and requests of a program, no plain errors: each ends its own episode with a reason, and no other."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from opd.config.verifiers import PythonConfig
from opd.records.episodes import EpisodeResult
from tests.unit.opd.rollouts.endpoint.test_episode import ASK, BARE, agent, run

over = threading.Event()
"""Set at the end of a test in which a verifier hangs."""


def hangs(text: str, answer: str, metadata: Any) -> float:
    over.wait(60)
    return 1.0


def leaves(text: str, answer: str, metadata: Any) -> float:
    raise SystemExit(f"no more of {text[:9]}")


def beside_a_good_one(code: str, tmp_path: Path, **options: Any) -> EpisodeResult:
    """Run the program's episode and return its result; the one beside it is whole."""
    found, good = run(agent(BARE + code, tmp_path, **options), agent(BARE + ASK, tmp_path, 1))[0]
    assert (good.stop_reason, good.error, good.audit.turns) == ("done", "", 1)
    return found


@pytest.mark.parametrize("reward", ["1" * 400, "-1e308", "1e999", "true", "[1]"])
def test_a_reward_that_is_no_number_to_train_on(reward: str, tmp_path: Path) -> None:
    found = beside_a_good_one(f"{ASK}print('{{\"reward\": {reward}}}')\n", tmp_path)
    assert found.stop_reason == "agent" and "wanted a finite number or null" in found.error
    assert found.audit.turns == len(found.rollouts) == 1, "its turn is trained"


@pytest.mark.parametrize("result", ["print('[' * 60_000)", "print('x' * 9_000_000)", "print(chr(27) + '[2J')"])
def test_a_result_that_is_none(result: str, tmp_path: Path) -> None:
    found = beside_a_good_one(f"{ASK}{result}\n", tmp_path)
    assert (found.stop_reason, found.reward, found.error) == ("done", None, "")


@pytest.mark.parametrize(
    ("ending", "reason", "reward", "told"),
    [
        ("print('{\"reward\": 0.5}')", "done", 0.5, ""),
        ("sys.exit('it is broken')", "agent", None, "exit status 1: it is broken"),
    ],
)
def test_what_was_said_is_kept_although_a_process_left_behind_could_say_more(
    ending: str, reason: str, reward: float | None, told: str, tmp_path: Path
) -> None:
    holds = "import subprocess\nleft = subprocess.Popen(['sleep', '30'], start_new_session=True)\n"
    pid = tmp_path / "pid"
    try:
        found = beside_a_good_one(f"{ASK}{holds}open({str(pid)!r}, 'w').write(str(left.pid))\n{ending}\n", tmp_path)
    finally:
        os.kill(int(pid.read_text()), signal.SIGKILL)
    assert (found.stop_reason, found.reward) == (reason, reward) and told in found.error


@pytest.mark.parametrize(
    ("verifier", "reason", "told"),
    [
        (leaves, "raised", "the verifier: SystemExit: no more of 3"),
        (hangs, "timeout", "the verifier was not back after"),
    ],
)
def test_a_verifier_that_gives_nothing(verifier: Any, reason: str, told: str, tmp_path: Path) -> None:
    judge = PythonConfig(kind="python", function=f"{__name__}:{verifier.__name__}")
    over.clear()
    try:
        found = beside_a_good_one(ASK, tmp_path, verifier=judge, timeout_s=4.0)
    finally:
        over.set()
    assert found.stop_reason == reason and told in found.error and found.reward is None


@pytest.mark.parametrize("result", ["", 'print(\'{"answer": "3", "reward": 1}\', flush=True)\n'])
@pytest.mark.parametrize("verifier", ["exact_match", None])
def test_a_program_that_hangs_gets_no_reward(verifier: Any, result: str, tmp_path: Path) -> None:
    found = beside_a_good_one(f"{ASK}{result}import time\ntime.sleep(60)\n", tmp_path, verifier=verifier, timeout_s=3.0)
    assert (found.stop_reason, found.reward, found.audit.turns) == ("timeout", None, 1)


@pytest.mark.parametrize("text", ["'x' * 10_000_000", "'\\x1b[2J\\x00' + '2'"], ids=["10 MB", "control"])
def test_what_the_programs_own_tool_gave(text: str, tmp_path: Path) -> None:
    begun = time.monotonic()
    found = beside_a_good_one(f"ask([{{'role': 'user', 'content': {text}}}])\n", tmp_path)
    if "10" in text:
        assert (found.stop_reason, found.audit.turns) == ("context", 0), "nothing of it was tokenised"
        assert time.monotonic() - begun < 20
    else:
        assert (found.stop_reason, found.audit.turns) == ("done", 1)


@pytest.fixture
def usual_depth() -> Iterator[None]:
    """Python's own limit: torch doubles it for the whole process once something was compiled."""
    before = sys.getrecursionlimit()
    sys.setrecursionlimit(1000)
    yield
    sys.setrecursionlimit(before)


@pytest.mark.usefixtures("usual_depth")
@pytest.mark.parametrize("depth", [500, 50_000])
def test_a_call_that_is_nested_too_deeply_is_the_programs_fault(depth: int, tmp_path: Path) -> None:
    code = (
        f"deep = '{{\"a\": ' * {depth} + '1' + '}}' * {depth}\n"
        "call = {'id': 'c', 'type': 'function', 'function': {'name': 'f', 'arguments': deep}}\n"
        "chat = [{'role': 'user', 'content': '2'}, {'role': 'assistant', 'tool_calls': [call]}]\n"
        "try: ask([*chat, {'role': 'tool', 'tool_call_id': 'c', 'content': 'x'}])\n"
        "except urllib.error.HTTPError as error: sys.exit(f\"{error.code} {json.load(error)['error']['message']}\")\n"
    )
    assert ": 400 " in beside_a_good_one(ASK + code, tmp_path).error


def test_a_program_whose_requests_are_refused_for_ever(tmp_path: Path) -> None:
    code = "while True:\n    try: ask(3)\n    except urllib.error.HTTPError: pass\n"
    found = beside_a_good_one(code, tmp_path, timeout_s=30.0, max_calls=9)
    assert (found.stop_reason, found.audit.turns, found.error) == ("turns", 0, "")
