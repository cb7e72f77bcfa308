"""Tasks at which the arms of `benchmarks.drift` begin."""

from __future__ import annotations

import json
from pathlib import Path

from benchmarks.drift import far_tasks

MOVES = {"a=": 20, "b=": 3, "c=": 15, "d=": 31}


def prompts(file: Path) -> list[str]:
    return [json.loads(line)["prompt"] for line in file.read_text().splitlines()]


def test_tasks_are_different_far_and_the_first_of_their_file(tmp_path: Path) -> None:
    source = tmp_path / "train.jsonl"
    rows = [{"prompt": prompt, "metadata": {"moves": moves}} for prompt, moves in [*MOVES.items(), *MOVES.items()]]
    source.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert far_tasks(source, 0, 0) == source
    assert prompts(far_tasks(source, 15, 0)) == ["a=", "c=", "d="]
    assert prompts(far_tasks(source, 15, 2)) == ["a=", "c="]
    assert prompts(far_tasks(source, 0, 2)) == ["a=", "b="]
