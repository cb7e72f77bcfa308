"""Intervals against their definition, against a simulation, and where they must not exist."""

from __future__ import annotations

from math import sqrt

import numpy as np
import pytest

from opd.report.intervals import Estimate, combine_terms, headroom_interval, mean_estimate, subtract_estimates


def wilson(right: int, questions: int = 100) -> Estimate:
    z = 1.959964
    share = right / questions
    centre = (share + z * z / (2 * questions)) / (1 + z * z / questions)
    half = z / (1 + z * z / questions) * sqrt(share * (1 - share) / questions + z * z / (4 * questions**2))
    return Estimate(share, centre - half, centre + half)


def test_a_difference_of_lopsided_intervals() -> None:
    found = subtract_estimates(Estimate(0.9, 0.7, 0.95), Estimate(0.5, 0.4, 0.8))
    assert found.value == pytest.approx(0.4)
    assert found.low == pytest.approx(0.4 - sqrt(0.2**2 + 0.3**2)), "the first one's lower, the second one's upper side"
    assert found.high == pytest.approx(0.4 + sqrt(0.05**2 + 0.1**2))


def test_a_mean_narrows() -> None:
    one = Estimate(0.5, 0.4, 0.7)
    found = mean_estimate([one, one, one, one])
    assert (found.value, found.low, found.high) == pytest.approx((0.5, 0.45, 0.6))
    assert combine_terms([(2.0, one)]) == Estimate(1.0, pytest.approx(0.8), pytest.approx(1.4))


@pytest.mark.parametrize(
    ("before", "after", "expert"), [(13, 92, 96), (0, 100, 100), (40, 41, 95), (20, 100, 60), (50, 30, 90)]
)
def test_the_ends_of_a_headroom_are_where_the_difference_is_just_possible(before: int, after: int, expert: int) -> None:
    """At each end h, (after - before) - h (expert - before) has an interval that ends at 0."""
    b, a, e = wilson(before), wilson(after), wilson(expert)
    found = headroom_interval(b, a, e)
    assert found is not None
    assert found.value == pytest.approx((after - before) / (expert - before))
    assert found.low < found.value < found.high
    for h, end in ((found.low, "low"), (found.high, "high")):
        # by hand: the coefficient of `before` changes its sign at h = 1, that of `expert` at h = 0
        sides = [a.value - a.low if end == "low" else a.high - a.value]
        for c, x in ((h - 1, b), (-h, e)):
            lower = (c > 0) == (end == "low")
            sides.append(abs(c) * (x.value - x.low if lower else x.high - x.value))
        left = (a.value - b.value) - h * (e.value - b.value)
        limit = left - sqrt(sum(s * s for s in sides)) if end == "low" else left + sqrt(sum(s * s for s in sides))
        assert limit == pytest.approx(0, abs=1e-9)


def test_an_expert_that_may_be_no_better_has_no_interval() -> None:
    assert headroom_interval(wilson(50), wilson(55), wilson(56)) is None
    assert headroom_interval(wilson(50), wilson(55), wilson(40)) is None
    assert headroom_interval(wilson(50), wilson(55), wilson(70)) is not None


@pytest.mark.parametrize("truth", [(0.13, 0.92, 0.96), (0.4, 0.9, 0.95), (0.2, 0.3, 0.6), (0.0, 0.97, 0.99)])
def test_the_interval_holds_the_truth_about_as_often_as_it_says(truth: tuple[float, float, float]) -> None:
    rng = np.random.default_rng(0)
    before, after, expert = truth
    want = (after - before) / (expert - before)
    draws = rng.binomial(100, truth, size=(600, 3))
    found = [headroom_interval(*(wilson(int(k)) for k in row)) for row in draws]
    held = [f.low <= want <= f.high for f in found if f is not None]
    assert len(held) == 600
    assert 0.92 <= sum(held) / len(held) <= 0.995
