"""The verdict that two methods differ: how often chance alone would give it, and how often it would hide a difference."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from opd.evaluation.statistics import Z, confidence_interval
from opd.records.scores import DomainScore
from pipelines.baselines.significance import Difference, compare_methods, t_quantile

ROUNDS = 400


def score(right: Sequence[float], *, kept: bool = True) -> DomainScore:
    """`kept`: as this release writes it, with the score of each question."""
    low, high = confidence_interval([[one] for one in right])
    return DomainScore(
        accuracy=float(np.mean(right)),
        stderr=0.0,
        low=low,
        high=high,
        questions=len(right),
        by_question=tuple(right) if kept else (),
    )


def verdicts(
    seeds: tuple[int, int],
    *,
    domains: int,
    accuracy: float = 0.7,
    spread: tuple[float, float] = (0.0, 0.0),
    gain: float = 0.0,
    kept: bool = True,
) -> dict[str, float]:
    """Verdict -> share of `ROUNDS` comparisons of greedy exams of 100 questions that are not equally hard.

    `spread`: standard deviation of a method's true accuracy over seeds; `gain`: how much better the first method is.
    """
    rng, found = np.random.default_rng(0), dict.fromkeys(("better", "worse", "tie"), 0.0)
    for _ in range(ROUNDS):
        logits = np.log(accuracy / (1 - accuracy)) + rng.standard_normal((domains, 100))
        methods = []
        for num, own, more in zip(seeds, spread, (gain, 0.0), strict=True):
            chance = 1 / (1 + np.exp(-logits)) + own * rng.standard_normal((num, 1, 1)) + more
            right = (rng.random((num, domains, 100)) < chance).astype(float)
            methods.append([{str(d): score(one[d], kept=kept) for d in range(domains)} for one in right])
        found[compare_methods(*methods).verdict] += 1 / ROUNDS
    return found


@pytest.mark.parametrize("spread", [0.0, 0.005, 0.02])
@pytest.mark.parametrize("domains", [1, 5])
@pytest.mark.parametrize("seeds", [2, 3, 10])
def test_of_a_merge_of_weights_that_is_as_good_chance_says_otherwise_in_one_case_of_twenty(
    seeds: int, domains: int, spread: float
) -> None:
    found = verdicts((1, seeds), domains=domains, spread=(0.0, spread))
    assert 0.005 < found["better"] + found["worse"] < 0.075, found  # 0.05 and two standard errors of 400 rounds


@pytest.mark.parametrize("spread", [(0.0, 0.0), (0.01, 0.01), (0.02, 0.0)])
def test_of_a_trained_method_too(spread: tuple[float, float]) -> None:
    found = verdicts((3, 3), domains=5, spread=spread)
    assert 0.005 < found["better"] + found["worse"] < 0.075, found


def test_a_difference_is_found() -> None:
    found = verdicts((1, 3), domains=5, spread=(0.0, 0.005), gain=0.1)
    assert found["better"] > 0.9 and found["worse"] == 0


def test_results_without_questions_are_compared_more_carefully() -> None:
    """Files of an older release: the same interval for other questions."""
    alike = verdicts((1, 3), domains=5, kept=False)
    assert alike["better"] + alike["worse"] < 0.03
    assert verdicts((1, 3), domains=5, gain=0.15, kept=False)["better"] > 0.8


def test_the_same_questions_wrong_tell_more_than_as_many_others() -> None:
    """A merge that is wrong where the other is, and in eight questions more, is worse; one that is wrong elsewhere may be."""
    ours = np.ones(100)
    ours[:30] = 0
    nested, other = ours.copy(), np.ones(100)
    nested[30:38] = 0
    other[62:] = 0
    seeds = [{"d": score(ours)}] * 2
    assert compare_methods([{"d": score(nested)}], seeds).verdict == "worse"
    assert compare_methods([{"d": score(other)}], seeds).verdict == "tie"


def test_without_any_chance_the_sign_decides() -> None:
    right, wrong = [{"d": score([1.0] * 9)}] * 2, [{"d": score([0.0] * 9)}]
    assert compare_methods(right, wrong) == Difference(mean=1.0, low=1.0, high=1.0)
    assert compare_methods(right, wrong).verdict == "better" and compare_methods(right, right).verdict == "tie"
    tenths = [{"d": score([0.1] * 3)}, {"d": score([0.3, 0.0, 0.0])}]
    assert compare_methods(tenths[:1] * 2, tenths[:1]).verdict == "tie"


def test_quantiles_are_never_too_small() -> None:
    assert t_quantile(2) == pytest.approx(4.303) and t_quantile(1e9) == pytest.approx(Z)
    for degrees, exact in ((1.5, 6.03), (2.5, 3.57), (12, 2.179), (20, 2.086), (60, 2.000)):
        assert exact <= t_quantile(degrees) < 1.2 * exact
