"""Intervals and pass@k against calculations done another way."""

from __future__ import annotations

from itertools import combinations
from math import sqrt

import numpy as np
import pytest

from opd.evaluation.statistics import confidence_interval, pass_at, standard_error


def answers(right: int, questions: int) -> list[list[float]]:
    return [[float(i < right)] for i in range(questions)]


@pytest.mark.parametrize(
    ("right", "questions", "low", "high"),
    # scipy.stats.binomtest(right, questions).proportion_ci(method="wilson")
    [(0, 10, 0.0, 0.2775328), (10, 10, 0.7224672, 1.0), (81, 263, 0.2552885, 0.3662096), (1, 1, 0.2065493, 1.0)],
)
def test_one_answer_a_question_gives_wilsons_interval(right: int, questions: int, low: float, high: float) -> None:
    assert confidence_interval(answers(right, questions)) == pytest.approx((low, high), abs=1e-7)


def test_the_standard_error_is_clustered_by_question() -> None:
    rng = np.random.default_rng(0)
    scores = rng.integers(0, 2, (30, 8)).astype(float)
    # Miller 2024, equation 4, written out over all pairs of answers to a question, with the usual small-sample factor.
    residual = scores - scores.mean()
    pairs = sum(float(np.outer(row, row).sum()) for row in residual)
    want = sqrt(pairs) / scores.size * sqrt(30 / 29)
    assert standard_error(scores.tolist()) == pytest.approx(want)


def test_copies_of_an_answer_say_nothing_new() -> None:
    once = answers(7, 20)
    copied = [question * 8 for question in once]
    assert standard_error(copied) == pytest.approx(standard_error(once))
    assert confidence_interval(copied) == pytest.approx(confidence_interval(once))
    assert confidence_interval([[1.0] * 8] * 20) == pytest.approx(confidence_interval(answers(20, 20)))


def test_answers_that_differ_within_questions_narrow_the_interval() -> None:
    half = [[1.0, 0.0] * 4] * 25
    low, high = confidence_interval(half)
    assert (low, high) == pytest.approx(confidence_interval(answers(100, 200)))  # as 200 draws, and no more
    assert 0 < standard_error([[0.9], [1.0]]) < 0.1


@pytest.mark.parametrize("value", [0.0, 1.0, 0.5])
def test_one_question_says_little(value: float) -> None:
    assert standard_error([[value]]) == 0.5
    low, high = confidence_interval([[value]])
    assert 0 <= low < high <= 1 and high - low > 0.75


@pytest.mark.parametrize(("a", "b", "n"), [(1.0, 1.0, 1), (0.5, 0.5, 4), (2.0, 6.0, 8), (8.0, 1.0, 4)])
def test_95_of_100_intervals_hold_the_truth(a: float, b: float, n: int) -> None:
    rng = np.random.default_rng(1)
    runs, questions, truth = 800, 60, a / (a + b)
    chances = rng.beta(a, b, (runs, questions, 1))
    scores = (rng.random((runs, questions, n)) < chances).astype(float)
    held = sum(low <= truth <= high for low, high in (confidence_interval(run.tolist()) for run in scores))
    assert 0.93 <= held / runs <= 0.98


@pytest.mark.parametrize("k", [1, 2, 3, 5])
def test_pass_at_k_is_the_share_of_choices_with_a_right_answer(k: int) -> None:
    scores = [[1.0, 0.0, 0.0, 0.0, 1.0], [0.0] * 5, [1.0] * 5, [0.0, 0.0, 0.0, 0.0, 1.0], [0.9, 0.5, 0.0, 0.0, 0.0]]
    shares = [np.mean([1.0 in choice for choice in combinations(question, k)]) for question in scores]
    assert pass_at(k, scores) == pytest.approx(np.mean(shares))
