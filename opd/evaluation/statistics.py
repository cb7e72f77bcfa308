"""Confidence of a measured accuracy, and pass@k.

Questions are the independent draws. Answers to one question are alike, so an interval that counted every answer as a
draw of its own would be too narrow (Miller, "Adding Error Bars to Evals", arXiv 2411.00640, section 2.2).
"""

from __future__ import annotations

from collections.abc import Sequence
from math import comb, inf, sqrt
from statistics import fmean, stdev

Z = 1.959964
"""97.5 % quantile of the standard normal distribution: 95 % intervals."""
WIDEST = 0.5
"""The largest standard deviation that values in 0..1 can have."""


def standard_error(scores: Sequence[Sequence[float]]) -> float:
    """Return the standard error of the mean of all scores, clustered by question. `scores`: [question][answer] in 0..1, with equally
    many answers to each question.

    The clustered estimate is then the standard error of the questions' means. A single question says nothing about how much
    questions differ, so the largest standard deviation is taken.
    """
    means = [fmean(question) for question in scores]
    return (stdev(means) if len(means) > 1 else WIDEST) / sqrt(len(means))


def confidence_interval(scores: Sequence[Sequence[float]]) -> tuple[float, float]:
    """Return the 95 % interval of the mean score; `scores` as in `standard_error`.

    Wilson's score interval (Wilson 1927) on the effective number of draws p (1 - p) / SE², after Dean and Pagano,
    "Evaluating Confidence Interval Methods for Binomial Proportions in Clustered Surveys" (2015). With one 0/1 answer a
    question that number is the number of questions, and this is Wilson's interval itself. The interval stays within 0..1 and has
    a width even if all answers are right. The effective number is at least that of questions and at most that of answers.
    """
    means = [fmean(question) for question in scores]
    num_questions, num_answers = len(means), sum(map(len, scores))
    p = fmean(means)
    variance = sum((mean - p) ** 2 for mean in means) / num_questions**2
    if p in (0.0, 1.0):
        # All answers are alike, so nothing says how much those to one question would differ.
        draws: float = num_questions
    else:
        draws = min(max(p * (1 - p) / variance if variance else inf, num_questions), num_answers)
    centre = (p + Z**2 / (2 * draws)) / (1 + Z**2 / draws)
    half = Z / (1 + Z**2 / draws) * sqrt(p * (1 - p) / draws + Z**2 / (4 * draws**2))
    return max(0.0, centre - half), min(1.0, centre + half)


def pass_at(k: int, scores: Sequence[Sequence[float]]) -> float:
    """Return an unbiased estimate, from n >= k answers to each question, of the chance that at least one of k answers is fully right;
    the mean over the questions.

    1 - C(n - c, k) / C(n, k) with c of n answers right (Chen et al., "Evaluating Large Language Models Trained on Code",
    arXiv 2107.03374, section 2.1).
    """
    return fmean(_pass_at(k, len(question), sum(score >= 1.0 for score in question)) for question in scores)


def _pass_at(k: int, n: int, right: int) -> float:
    """Return the same for one question, of whose n answers `right` are right."""
    assert k <= n, "the pipeline's `pass_at` has been checked against `n`"
    return 1.0 - comb(n - right, k) / comb(n, k)
