"""95 % intervals of numbers that are computed from several measured accuracies.

Each accuracy comes with its own interval, lopsided near 0 and 1 (Wilson's). MOVER, the method of variance estimates
recovery (Zou and Donner, "Construction of confidence limits about effect measures", Statistics in Medicine 27, 2008),
carries such limits over to a sum: with c_i theta_i in [l_i, u_i],

    lower = sum c_i theta_i - sqrt(sum (c_i theta_i - l_i)^2),  upper likewise.

For the headroom, a ratio, the sum is inverted as Fieller does it: the interval is every h for which the interval of
(after - before) - h (expert - before) holds 0. Nothing is assumed to be symmetric or far from 1, where the delta method
would give an interval of no width (an accuracy of 1.00 on 100 questions has a standard error of 0).

The accuracies are treated as independent. In fact student, expert and merged model answer the same questions, and what is
hard for one is usually hard for the others, so the intervals are a little wider than they need to be.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import hypot

ROUNDS = 80
"""Rounds of the bisection: each halves what is left."""


@dataclass(frozen=True, slots=True)
class Estimate:
    """A number with its 95 % interval."""

    value: float
    low: float
    high: float


def combine_terms(terms: Sequence[tuple[float, Estimate]]) -> Estimate:
    """sum_i c_i theta_i over terms (c_i, theta_i)."""
    value = sum(c * e.value for c, e in terms)
    down = [c * (e.value - (e.low if c > 0 else e.high)) for c, e in terms]
    up = [c * ((e.high if c > 0 else e.low) - e.value) for c, e in terms]
    return Estimate(value, value - hypot(*down), value + hypot(*up))


def subtract_estimates(first: Estimate, second: Estimate) -> Estimate:
    """first - second."""
    return combine_terms([(1.0, first), (-1.0, second)])


def mean_estimate(estimates: Sequence[Estimate]) -> Estimate:
    """Return the mean of at least one estimate."""
    return combine_terms([(1 / len(estimates), e) for e in estimates])


def is_clear(before: Estimate, expert: Estimate) -> bool:
    """Return True if the interval of expert - before lies above 0. Otherwise headroom has no bounds: any share of it, positive or
    negative, fits the measurements."""
    return subtract_estimates(expert, before).low > 0


def headroom_interval(before: Estimate, after: Estimate, expert: Estimate) -> Estimate | None:
    """(after - before) / (expert - before), not cut at 0 or 1.

    None unless `is_clear`.
    """
    if not is_clear(before, expert):
        return None
    value = (after.value - before.value) / (expert.value - before.value)

    def residual(h: float) -> Estimate:
        """(after - before) - h (expert - before); falls with h."""
        return combine_terms([(1.0, after), (h - 1.0, before), (-h, expert)])

    return Estimate(
        value, _find_crossing(lambda h: residual(h).low, value, -1.0), _find_crossing(lambda h: residual(h).high, value, 1.0)
    )


def _find_crossing(limit: Callable[[float], float], start: float, step: float) -> float:
    """Return the h at which `limit`, which falls with h, crosses 0; looks from `start` in the direction of `step`."""
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
