"""The judge's words in a run stand: across threads, workers, and kills."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from itertools import count
from pathlib import Path

import pytest

from opd.guard.judge import LogProbJudge
from opd.guard.records import JudgeFailed, Opinion, Question
from opd.guard.verdict_file import StoredJudge


def question(command: str = "curl x.org") -> Question:
    return Question(tool="shell", text=command, command=command, suspicion="network")


class Fickle:
    """Says something else each time."""

    def __init__(self, wait_s: float = 0.0) -> None:
        self.numbers: Iterator[int] = count()
        self.asked = 0
        self.wait_s = wait_s

    def judge(self, asked: Question) -> Opinion:
        number = next(self.numbers)
        self.asked += 1
        time.sleep(self.wait_s)
        if asked.text == "fail":
            raise JudgeFailed("not there")
        return Opinion(block=number % 2 == 0, reason=f"number {number}")


def test_a_run_that_goes_on_does_not_ask_again(tmp_path: Path) -> None:
    first, second = Fickle(), Fickle()
    said = StoredJudge(first, tmp_path / "judged.jsonl", "j").judge(question())
    again = StoredJudge(second, tmp_path / "judged.jsonl", "j")
    assert again.judge(question()) == said == again.judge(question()) and second.asked == 0
    again.judge(question("other"))
    again.judge(replace(question(), text="curl x.org -d @- <<< y"))
    assert second.asked == 2
    StoredJudge(second, tmp_path / "judged.jsonl", "another judge").judge(question())
    assert second.asked == 3


def test_the_first_answer_of_two_workers_counts_for_both(tmp_path: Path) -> None:
    one, two = Fickle(), Fickle()
    next(two.numbers)  # it says the opposite
    left, right = (StoredJudge(judge, tmp_path / "judged.jsonl", "j") for judge in (one, two))
    said: list[Opinion] = []
    right._judge.judge = lambda asked: [said.append(left.judge(asked)), Fickle.judge(two, asked)][1]  # type: ignore[method-assign] # while it thinks, the other answers
    assert right.judge(question()) == said[0] == left.judge(question())
    assert (one.asked, two.asked) == (1, 1)


def test_threads_with_the_same_question_ask_once(tmp_path: Path) -> None:
    judge = Fickle(0.05)
    stored, found = StoredJudge(judge, tmp_path / "judged.jsonl", "j"), list[Opinion]()
    threads = [threading.Thread(target=lambda: found.append(stored.judge(question()))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert len(found) == 8 and len(set(found)) == 1 and judge.asked == 1


def test_failures_are_not_stored(tmp_path: Path) -> None:
    judge = Fickle()
    stored = StoredJudge(judge, tmp_path / "judged.jsonl", "j")
    for _ in range(2):
        with pytest.raises(JudgeFailed):
            stored.judge(question("fail"))
    assert judge.asked == 2 and not (tmp_path / "judged.jsonl").exists()


def test_a_line_that_was_cut_by_a_kill_is_passed_over(tmp_path: Path) -> None:
    path = tmp_path / "judged.jsonl"
    StoredJudge(Fickle(), path, "j").judge(question("kept"))
    whole = path.read_bytes()
    StoredJudge(Fickle(), path, "j").judge(question("cut"))
    path.write_bytes(path.read_bytes()[: len(whole) + 20])
    judge = Fickle()
    stored = StoredJudge(judge, path, "j")
    assert stored.judge(question("kept")).reason == "number 0" and judge.asked == 0
    stored.judge(question("cut"))
    assert judge.asked == 1 and StoredJudge(Fickle(), path, "j").judge(question("cut")).reason == "number 0"
    good = [line for line in path.read_text().splitlines() if line.endswith("}")]
    assert [json.loads(line)["command"] for line in good] == ["kept", "cut"]


def test_a_scorer_that_hangs_fails_its_question_and_no_other_waits_for_it() -> None:
    free = threading.Event()
    judge = LogProbJudge(lambda prompt, verdicts: [free.wait(20), (-1.0, -2.0)][1], 0.5, deadline_s=0.1)
    with pytest.raises(JudgeFailed, match=r"did not come back within 0\.1 s"):
        judge.judge(question())
    began = time.monotonic()
    with pytest.raises(JudgeFailed, match="earlier question"):
        judge.judge(question())
    assert time.monotonic() - began < 5
    free.set()
    assert judge._running is not None
    judge._running.join(20)
    assert not judge.judge(question()).block


def test_a_scorer_that_raises_is_no_answer() -> None:
    with pytest.raises(JudgeFailed, match="ZeroDivisionError"):
        LogProbJudge(lambda prompt, verdicts: [1 / 0], 0.5, deadline_s=5).judge(question())
