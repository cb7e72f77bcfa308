"""Right is 1, wrong is 0, and nothing in between."""

from __future__ import annotations

import pytest

from opd.config import DomainEvalConfig
from opd.evaluation.verifiers import VERIFIERS, exact_match, last_line, reasoning_gym


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


def test_verifiers_are_found_by_name() -> None:
    assert {name: f.__name__ for name, f in VERIFIERS.items()} == {name: name for name in VERIFIERS}


def test_every_verifier_can_be_asked_for_and_no_other() -> None:
    schema = DomainEvalConfig.model_json_schema()["properties"]["verifier"]
    assert set(schema["enum"]) == set(VERIFIERS)
