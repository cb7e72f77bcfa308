"""Judge whether one method is better than another, or whether another seed or other questions could explain the difference.

Both methods answer the same questions, so they are compared question by question (Miller, "Adding Error Bars to Evals", arXiv
2411.00640, section 4.2): with d_q the difference on question q, of the means over seeds, and m_s the mean accuracy of seed s,

    variance = sum over domains of var(d_q) / Q / D^2 + sum over both methods of var(m_s) / S - noise

over Q questions of each of D domains and S seeds; a merge of weights without chance has one seed and no variance from it. Seeds and
questions are crossed random effects, and both parts hold what is left of a score without its seed and its question: `noise` is that
part, taken off once, as far as neither part alone would be larger than the whole. Degrees of freedom are Satterthwaite's, of
Student's t.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import sqrt
from statistics import fmean, variance
from typing import TYPE_CHECKING

import numpy as np

from opd.evaluation.statistics import Z
from opd.records.scores import DomainScore

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Floats = NDArray[np.float64]

Scores = Mapping[str, DomainScore]
"""One seed's scores by domain."""
T_QUANTILES = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)
"""97.5 % quantiles of Student's t distribution with 1, 2, ... degrees of freedom."""
SLACK = 1e-9
"""Tolerance for rounding: equal means of unequal sums differ in their last bits."""


def t_quantile(degrees: float) -> float:
    """Return the 97.5 % quantile of Student's t with any number of degrees of freedom, rather too large than too small.

    Between the entries of the table, and from its last one to the normal distribution, it follows a straight line in 1 /
    degrees; the true quantile never lies above that line.
    """
    inverse_degrees = [0.0, *(1 / n for n in range(len(T_QUANTILES), 0, -1))]
    return float(np.interp(1 / degrees, inverse_degrees, [Z, *T_QUANTILES[::-1]]))


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """Accuracy of one method minus that of another, with its 95 % interval."""

    mean: float
    low: float
    high: float

    @property
    def verdict(self) -> str:
        """Return `tie`, `better` or `worse`."""
        if self.low <= SLACK and self.high >= -SLACK:
            return "tie"
        return "better" if self.mean > 0 else "worse"

    def __str__(self) -> str:
        return f"{self.mean:+.3f} ± {self.high - self.mean:.3f}"


@dataclass(frozen=True, slots=True, kw_only=True)
class _VarianceShare:
    """A part of the variance, and its degrees of freedom, which say how well it is known."""

    variance: float
    degrees: int


def compare_methods(candidate: Sequence[Scores], reference: Sequence[Scores]) -> Difference:
    """Return the mean accuracy of `candidate` minus that of `reference`, over the domains of `candidate`; each has the scores
    of its seeds."""
    sides, domains = (candidate, reference), candidate[0].keys()
    by_seed = [[fmean(scores[domain].accuracy for domain in domains) for scores in side] for side in sides]
    seeds = [_VarianceShare(variance=variance(m) / len(m), degrees=len(m) - 1) for m in by_seed if len(m) > 1]
    questions, noise = [], 0.0
    for domain in domains:
        part, domain_noise = _estimate_domain_variance(*([scores[domain] for scores in side] for side in sides))
        questions.append(_VarianceShare(variance=part.variance / len(domains) ** 2, degrees=part.degrees))
        noise += domain_noise / len(domains) ** 2
    by_chance = [sum(part.variance for part in parts) for parts in (questions, seeds)]
    total = max(sum(by_chance) - noise, *by_chance)
    mean = fmean(by_seed[0]) - fmean(by_seed[1])
    parts = [part for part in (*questions, *seeds) if part.variance]
    if not parts:
        return Difference(mean=mean, low=mean, high=mean)
    degrees = total**2 / sum(part.variance**2 / part.degrees for part in parts)
    half = t_quantile(degrees) * sqrt(total)
    return Difference(mean=mean, low=mean - half, high=mean + half)


def _estimate_domain_variance(
    candidate: Sequence[DomainScore], reference: Sequence[DomainScore]
) -> tuple[_VarianceShare, float]:
    """Return the questions' part of the variance of one domain, and the noise in it.

    Results of a release that did not keep the score of each question are taken for answers to other questions, and their seeds for
    alike: an interval that is too wide.
    """
    lengths = {len(score.by_question) for score in (*candidate, *reference)}
    least = min(score.questions for score in (*candidate, *reference))
    if len(lengths) > 1 or lengths.pop() < 2:
        # The 95 % interval of an exam is 2 Z standard errors wide.
        side_variances = (
            fmean(((score.high - score.low) / (2 * Z)) ** 2 for score in side) for side in (candidate, reference)
        )
        return _VarianceShare(variance=sum(side_variances), degrees=max(1, least - 1)), 0.0
    first_S_Q, second_S_Q = (np.array([score.by_question for score in side]) for side in (candidate, reference))
    difference_Q = first_S_Q.mean(0) - second_S_Q.mean(0)
    part = _VarianceShare(variance=float(difference_Q.var(ddof=1)) / len(difference_Q), degrees=len(difference_Q) - 1)
    return part, sum(map(_estimate_noise, (first_S_Q, second_S_Q)))


def _estimate_noise(score_S_Q: Floats) -> float:
    """Return the part of the variance of the mean of all scores that neither their seed nor their question explains; 0 for one
    seed, where it cannot be told from the question's part."""
    seeds, questions = score_S_Q.shape
    if seeds == 1:
        return 0.0
    # Residuals of a table with one cell for each seed and question, and their degrees of freedom.
    rest_S_Q = score_S_Q - score_S_Q.mean(0) - score_S_Q.mean(1, keepdims=True) + score_S_Q.mean()
    return float((rest_S_Q**2).sum()) / ((seeds - 1) * (questions - 1)) / score_S_Q.size
