"""Verifiers that read the text alone: right is 1, wrong is 0, and nothing in between."""

from __future__ import annotations

from typing import Any, get_args

import pytest

from opd.config.verifiers import VERIFIER_OPTIONS, VerifierName
from opd.verifiers import VERIFIERS, build_verifier
from opd.verifiers.exact import ExactMatch, LastLine
from opd.verifiers.multiple_choice import MultipleChoice
from opd.verifiers.numeric import Numeric, last_number
from opd.verifiers.reasoning_gym import ReasoningGym
from opd.verifiers.regex import Regex


def test_every_verifier_can_be_asked_for_and_no_other() -> None:
    assert {*get_args(VerifierName), *VERIFIER_OPTIONS} == set(VERIFIERS)


def test_a_name_alone_means_the_defaults() -> None:
    assert build_verifier("numeric") == Numeric(tolerance=0.0)
    assert build_verifier("multiple_choice") == MultipleChoice(choices="ABCD")


@pytest.mark.parametrize(
    ("text", "answer", "score"),
    [("abc", "abc", 1), (" abc\n", "abc", 1), ("abc", "abc ", 1), ("abcd", "abc", 0), ("ABC", "abc", 0), ("", "a", 0)],
)
def test_exact_match(text: str, answer: str, score: float) -> None:
    assert ExactMatch()(text, answer, {}) == score


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
    assert LastLine()(text, answer, {}) == score


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("The sum is 1,204.50.", "1204.5"),
        ("#### 72", "72"),
        ("x=-4", "-4"),
        ("3-4", "4"),
        ("10 - 4", "4"),
        ("10 −4", "-4"),
        ("from 5 to .5", "0.5"),
        ("1.5e-3 m", "0.0015"),
        ("+7", "7"),
        ("$3.00", "3"),
        ("1,2345", "2345"),
        ("12,345,678", "12345678"),
        ("007", "7"),
        ("no number", None),
        ("", None),
        (".", None),
        ("½", None),
    ],
)
def test_the_last_number_of_a_text(text: str, number: str | None) -> None:
    found = last_number(text)
    assert (None if found is None else float(found)) == (None if number is None else float(number))


@pytest.mark.parametrize(
    ("text", "answer", "tolerance", "score"),
    [
        ("so 12.0", "12", 0.0, 1),
        ("12 apples, then 13", "12", 0.0, 0),
        ("0.3", "0.30", 0.0, 1),
        ("0.30000000000000004", "0.3", 0.0, 0),
        ("0.34", "0.33", 0.01, 1),
        ("0.35", "0.33", 0.01, 0),
        ("none", "0", 0.5, 0),
        ("72", "4 and so 72", 0.0, 1),
    ],
)
def test_numeric(text: str, answer: str, tolerance: float, score: float) -> None:
    assert build_verifier("numeric") == Numeric()
    assert Numeric(tolerance)(text, answer, {}) == score


@pytest.mark.parametrize(
    ("pattern", "text", "answer", "score"),
    [
        (r"\\boxed\{(.*?)\}", r"first \boxed{3}, no: \boxed{ 4 }", "4", 1),
        (r"\\boxed\{(.*?)\}", r"\boxed{4}, no: \boxed{3}", "4", 0),
        (r"\d+", "12 and 13", "13", 1),
        (r"\d+", "none", "13", 0),
        (r"x(y)?", "x", "", 0),
        (r"a(b)(c)", "abc", "b", 1),
    ],
)
def test_regex(pattern: str, text: str, answer: str, score: float) -> None:
    assert Regex(pattern)(text, answer, {}) == score


@pytest.mark.parametrize(
    ("text", "letter"),
    [
        ("B", "B"),
        ("b", "B"),
        (" (b). ", "B"),
        ("The answer is (C).", "C"),
        ("Answer: D", "D"),
        ("A is wrong and B too. The answer is C, not D", "C"),
        ("A) no\nB) yes", "B"),
        ("I would take C", "C"),
        ("A cat sat. Definitely B.", "B"),
        ("Because of D's size", None),
        ("the answer is a dog", None),
        ("E", None),
        ("Bad", None),
        ("", None),
    ],
)
def test_the_letter_that_a_text_settles_on(text: str, letter: str | None) -> None:
    assert MultipleChoice().find_chosen_letter(text) == letter
    assert [MultipleChoice()(text, choice, {}) for choice in "ABCD"] == [float(choice == letter) for choice in "ABCD"]


def test_choices_are_those_of_the_pipeline() -> None:
    assert MultipleChoice("ABCDE")("E", "E", {}) == 1.0
    assert MultipleChoice("AB").problem("C", {}) == "answer 'C', none of the letters AB"


@pytest.mark.parametrize(
    ("verifier", "answer", "metadata", "problem"),
    [
        (ExactMatch(), "", {}, "no `answer`"),
        (LastLine(), " ", {}, "no `answer`"),
        (LastLine(), "1\n2", {}, "answer '1\\n2', more than one line"),
        (LastLine(), "\n2\n", {}, ""),
        (ExactMatch(), "x", {}, ""),
        (Regex("x"), "", {}, "no `answer`"),
        (Numeric(), "seven", {}, "answer 'seven', no number"),
        (Numeric(), "7", {}, ""),
        (MultipleChoice(), "", {}, "answer '', none of the letters ABCD"),
        (ReasoningGym(), "", {"task": "x"}, "no metadata.entry, which `opd prompts make reasoning` writes"),
        (ReasoningGym(), "", {"task": "gcd", "entry": {}}, ""),
    ],
)
def test_rows_that_cannot_be_judged_are_known_beforehand(
    verifier: Any, answer: str, metadata: dict[str, Any], problem: str
) -> None:
    assert verifier.problem(answer, metadata) == problem


def test_reasoning_gym_judges_by_the_family() -> None:
    gym = pytest.importorskip("reasoning_gym")
    entry = gym.create_dataset("chain_sum", size=1, seed=1)[0]
    metadata = {"task": "chain_sum", "entry": entry}
    judge = ReasoningGym()
    assert judge(f" {entry['answer']}\n", entry["answer"], metadata) == 1.0
    assert judge("no idea", entry["answer"], metadata) == 0.0
    assert judge(str(int(entry["answer"]) + 1), entry["answer"], metadata) == 0.0
