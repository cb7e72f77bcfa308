"""95 % intervals of numbers that are computed from several measured accuracies.

Each accuracy comes with its own interval (Wilson's), which is lopsided near 0 and 1. MOVER, the method of variance
estimates recovery (Zou and Donner, "Construction of confidence limits about effect measures", Statistics in Medicine 27,
2008), gives limits for a sum of such numbers: with c_i theta_i in [l_i, u_i],

    lower = sum c_i theta_i - sqrt(sum (c_i theta_i - l_i)^2),  upper likewise.

Headroom is a ratio, so the sum is inverted as Fieller does it: its interval is every h for which the interval of
(after - before) - h (expert - before) contains 0. This assumes neither symmetric intervals nor accuracies far from 1. There
the delta method would give an interval of width 0: an accuracy of 1.00 on 100 questions has a standard error of 0.

The accuracies are treated as independent. In fact student, expert and merged model answer the same questions, and what is
hard for one is usually hard for the others. So the intervals are a little wider than they need to be.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import hypot

ROUNDS = 80
"""Rounds of the bisection. Each halves the interval, so after 80 it has no width in double precision."""


@dataclass(frozen=True, slots=True)
class Estimate:
    """A number with its 95 % interval."""

    value: float
    low: float
    high: float


def combine_terms(terms: Sequence[tuple[float, Estimate]]) -> Estimate:
    """Return sum_i c_i theta_i with its interval by MOVER; `terms` are the pairs (c_i, theta_i)."""
    value = sum(c * e.value for c, e in terms)
    down = [c * (e.value - (e.low if c > 0 else e.high)) for c, e in terms]
    up = [c * ((e.high if c > 0 else e.low) - e.value) for c, e in terms]
    return Estimate(value, value - hypot(*down), value + hypot(*up))


def subtract_estimates(first: Estimate, second: Estimate) -> Estimate:
    """Return first - second with its interval."""
    return combine_terms([(1.0, first), (-1.0, second)])


def mean_estimate(estimates: Sequence[Estimate]) -> Estimate:
    """Return the mean of at least one estimate."""
    return combine_terms([(1 / len(estimates), e) for e in estimates])


def is_clear(before: Estimate, expert: Estimate) -> bool:
    """Return True if the interval of expert - before lies above 0.

    Otherwise the interval of the headroom has no ends: any share, positive or negative, would fit the measurements.
    """
    return subtract_estimates(expert, before).low > 0


def headroom_interval(before: Estimate, after: Estimate, expert: Estimate) -> Estimate | None:
    """Return the headroom (after - before) / (expert - before) with its interval, not cut at 0 or 1; None unless `is_clear`."""
    if not is_clear(before, expert):
        return None
    value = (after.value - before.value) / (expert.value - before.value)

    def residual(h: float) -> Estimate:
        """Return (after - before) - h (expert - before), which falls as h grows."""
        return combine_terms([(1.0, after), (h - 1.0, before), (-h, expert)])

    return Estimate(
        value,
        _find_crossing(lambda h: residual(h).low, value, -1.0),
        _find_crossing(lambda h: residual(h).high, value, 1.0),
    )


def _find_crossing(limit: Callable[[float], float], start: float, step: float) -> float:
    """Return the h at which `limit(h)`, which falls as h grows, crosses 0.

    The search goes from `start` in the direction of `step`, and doubles `step` until it is past the crossing.
    """
    far = start + step
    while limit(far) * step > 0:  # ends, because `headroom_interval` has checked that expert - before is clearly not 0
        step *= 2
        far = start + step
    near = start
    for _ in range(ROUNDS):
        middle = (near + far) / 2
        if limit(middle) * step > 0:
            near = middle
        else:
            far = middle
    return (near + far) / 2
