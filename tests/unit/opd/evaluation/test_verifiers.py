"""Right is 1, wrong is 0, and nothing in between."""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from unittest.mock import ANY

import pytest

from experts.suites.reasoning import DOMAINS
from opd.config import DomainEvalConfig
from opd.evaluation.verifiers import GYM_TASKS, VERIFIERS, exact_match, gym_problem, last_line, reasoning_gym


@pytest.mark.parametrize(
    ("text", "answer", "score"),
    [("abc", "abc", 1), (" abc\n", "abc", 1), ("abc", "abc ", 1), ("abcd", "abc", 0), ("ABC", "abc", 0), ("", "a", 0)],
)
def test_exact_match(text: str, answer: str, score: float) -> None:
    assert exact_match(text, answer, {}) == score


@pytest.mark.parametrize(
    ("text", "answer", "score"),
    [
        ("2+2\n4", "4", 1),
        ("working\n\n 4 \n\n", "4", 1),
        ("4\nwrong", "4", 0),
        ("the answer is 4", "4", 0),
        ("", "4", 0),
        ("\n \n", "", 0),
    ],
)
def test_last_line(text: str, answer: str, score: float) -> None:
    assert last_line(text, answer, {}) == score


def test_reasoning_gym_judges_by_the_family() -> None:
    gym = pytest.importorskip("reasoning_gym")
    entry = gym.create_dataset("chain_sum", size=1, seed=1)[0]
    metadata = {"task": "chain_sum", "entry": entry}
    assert reasoning_gym(f" {entry['answer']}\n", entry["answer"], metadata) == 1.0
    assert reasoning_gym("no idea", entry["answer"], metadata) == 0.0
    assert reasoning_gym(str(int(entry["answer"]) + 1), entry["answer"], metadata) == 0.0


def test_tasks_are_those_of_the_suite_and_their_scorers_run_nothing() -> None:
    gym = pytest.importorskip("reasoning_gym")
    assert {task for task, _ in DOMAINS.values()} == GYM_TASKS
    sources = {task: inspect.getsource(gym.get_score_answer_fn(task)) for task in GYM_TASKS}
    runs = {task for task, source in sources.items() if re.search(r"eval\(|exec\(|parse_expr|sympify", source)}
    assert runs == {"number_sorting"}
    assert gym_problem({"task": "chain_sum", "entry": {}}) is None


def test_a_prompts_file_cannot_make_a_scorer_run_code(tmp_path: Path) -> None:
    pytest.importorskip("reasoning_gym")
    ran = tmp_path / "ran"
    evil = f"open({str(ran)!r}, 'w').write('x') * [1]"
    entry = {"answer": evil, "metadata": {"direction": "ascending"}}
    metadata = {"task": "number_sorting", "entry": entry}
    reasoning_gym("[1]", "", metadata)
    assert ran.exists(), "the hole that is stopped at the door"
    assert gym_problem(metadata) == ("a metadata.entry.answer that is no JSON", ANY)
    assert gym_problem(metadata | {"entry": entry | {"answer": "['1', '2']"}}) is not None
    assert gym_problem(metadata | {"entry": {"answer": '["1", "2"]'}}) is None
    for entry in (None, {}, {"answer": 3}):
        assert gym_problem(metadata | {"entry": entry}) is not None
    for task in ("countdown", "n_queens", "codeio", ["chain_sum"], None):
        with_task = gym_problem({"task": task, "entry": {}})
        assert with_task is not None and with_task[0].startswith("metadata.task ")
    assert gym_problem({"task": "gcd"}) == ("no metadata.entry", ANY)


def test_verifiers_are_found_by_name() -> None:
    assert {name: f.__name__ for name, f in VERIFIERS.items()} == {name: name for name in VERIFIERS}


def test_every_verifier_can_be_asked_for_and_no_other() -> None:
    schema = DomainEvalConfig.model_json_schema()["properties"]["verifier"]
    assert set(schema["enum"]) == set(VERIFIERS)
