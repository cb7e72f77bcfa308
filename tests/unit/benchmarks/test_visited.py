"""States that `benchmarks.visited` counts."""

from __future__ import annotations

import json
from pathlib import Path

from benchmarks.visited import OFTEN, Visited, right_ways, states_seen
from opd.environments.hanoi import Hanoi
from opd.records.environments import Action


def task(start: str) -> dict[str, object]:
    return {"game": "hanoi", "form": "characters", "start": start}


def write(file: Path, *starts: str) -> Path:
    file.write_text("".join(json.dumps({"prompt": start, "metadata": task(start)}) + "\n" for start in starts))
    return file


def play(log: Path, start: str, *moves: str) -> None:
    game = Visited("hanoi", str(log))
    game.reset(task(start), seed=0)
    for move in moves:
        game.step(Action(text=move))


def test_states_of_training_episodes_are_counted_and_those_of_exams_are_not(tmp_path: Path) -> None:
    tasks, exam = write(tmp_path / "train.jsonl", "ba"), write(tmp_path / "exam.jsonl", "aa")
    log = tmp_path / "log"
    for _ in range(OFTEN):
        play(log, "ba", "ac", "bc")  # the right way: ba, bc, end
    play(log, "ba", "ba", "ab", "ba")  # to aa, back to ba, and to aa again
    play(log, "aa", "ab", "ac", "bc")  # an exam: aa, ba, bc, end
    found = states_seen("hanoi", log, tasks, exam)
    assert (found.turns, found.different, found.often) == (2 * OFTEN + 3, 3, 2)
    assert found.on_the_way == 2 / 3, "of aa, ba and bc training saw the first once"


def test_a_right_way_ends_before_the_end(tmp_path: Path) -> None:
    (way,) = right_ways("hanoi", write(tmp_path / "tasks.jsonl", "aa"))
    assert way == ["aa", "ba", "bc"]
    assert Hanoi().apply_move(way[-1], "bc") == "cc"
