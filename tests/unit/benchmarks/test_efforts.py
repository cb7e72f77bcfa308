"""The tasks of the benchmark of efforts: each step follows from the one before, and every form ends in the same answer."""

from __future__ import annotations

import random

import pytest

from benchmarks.efforts import BUDGETS, EVERY, OPERATIONS, TASKS, draw_questions, write_answer

MOVES: dict[str, dict[tuple[str, str], str]] = {
    "lift": {("9", "u"): "0", ("0", "d"): "9", ("7", "g"): "0"},
    "walk": {("j", ">"): "a", ("a", "<"): "j", ("h", "."): "a"},
    "cup": {("a", "x"): "b", ("c", "x"): "c", ("b", "y"): "c", ("c", "z"): "a", ("b", "p"): "a"},
}


@pytest.mark.parametrize("domain", TASKS)
def test_a_step_depends_on_the_one_before_and_its_move(domain: str) -> None:
    known = MOVES[domain]
    seen: dict[tuple[str, str], set[str]] = {}
    for prompt, steps in draw_questions(domain, 400):
        start, *moves = prompt.split(" ")[1].rstrip("=")
        for before, move, after in zip([start, *steps], moves, steps, strict=False):
            seen.setdefault((before, move), set()).add(after)
        assert len(moves) == len(steps) == OPERATIONS
    assert all(len(results) == 1 for results in seen.values())
    assert {key: seen[key].pop() for key in known} == known


def test_more_effort_shows_more_steps_and_no_form_is_over_its_budget() -> None:
    _, steps = TASKS["lift"](random.Random(0))
    answers = {effort: write_answer(steps, effort) for effort in EVERY}
    assert answers["low"] == steps[-1] and answers["max"] == "".join(steps) + "\n" + steps[-1]
    assert answers["high"] == "".join(steps[1::2]) + "\n" + steps[-1]
    lengths = {effort: len(answer) + 1 for effort, answer in answers.items()}  # with the end token
    assert lengths["low"] <= (BUDGETS["low"] or 0) < lengths["high"] <= (BUDGETS["high"] or 0) < lengths["max"]
