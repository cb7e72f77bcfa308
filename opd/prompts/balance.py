"""The number of samples of a step that each domain gets, from what the steps before it showed.

    records ──▶ signals of each domain ──▶ real numbers of samples ──▶ whole numbers
                (loss, slope, cut, length)  (within floor and cap)      (right on average)

Only training decides, never an exam. The numbers are a function of the section, the weights, the seed and the records of the
steps before. A resume has these records, so it takes the same prompts. There are no powers and logarithms in it, whose last
bits differ between machines.
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping
from typing import Literal

from opd.config.balance import GapBalance, TokensBalance
from opd.records.step import DomainRecord, StepRecord

LEAST_PULL = 1e-6
"""The least pull of a domain, as a share of the strongest: the bisection needs numbers above 0."""

STEEPEST = 2.0
"""Bound of a rising slope: what a divergence can reach; an estimate from sampled tokens can be near 0 by chance."""


class Balance:
    """The domains' numbers of samples, step by step."""

    def __init__(
        self, section: TokensBalance | GapBalance, weights: Mapping[str, float], total: int, seed: int
    ) -> None:
        """`total` samples in each step, at least one for each domain."""
        self._section = section
        self._seed = seed
        self._total = total
        self._weights = weights
        per = section.per if isinstance(section, GapBalance) else "token"
        self._signals = {name: TrainingMeans(section.window, per) for name in weights}

    def record_step(self, record: StepRecord) -> None:
        """Take in the next step's record."""
        for name, stats in record.domains.items():
            self._signals[name].record_means(
                stats, record.truncated_by_domain.get(name, 0), record.prompts.get(name, 0)
            )

    def exact_counts(self) -> dict[str, float]:
        """Samples of each domain in the next step, not yet whole; they add up to the total."""
        section, counts = self._section, in_proportion(self._total, self._weights)
        if isinstance(section, GapBalance):
            gaps = {name: signals.gap for name, signals in self._signals.items()}
            # What is shared out in tokens has its least number of samples below.
            least, own = (
                (1.0, samples_by_weight(self._total, self._weights)) if section.of == "samples" else (0.0, counts)
            )
            low = {name: max(least, section.floor * samples) for name, samples in own.items()}
            high = {name: section.cap * samples for name, samples in own.items()}
            counts = fit_proportions(counts, gaps, low, high)
        return at_least_one(counts, self._prompts_per_token()) if section.of == "tokens" else counts

    def count_samples(self, step: int) -> dict[str, int]:
        """Samples of each domain in the next step, which is `step`."""
        return round_counts(self.exact_counts(), self._total, random.Random(f"{self._seed}/balance/{step}").random())

    def _prompts_per_token(self) -> dict[str, float]:
        """Prompts for each trained token; a domain that has not been trained yet counts as the others do on average."""
        rates = {name: 1 / length for name, signals in self._signals.items() if (length := signals.length.value)}
        average = sum(rates.values()) / len(rates) if rates else 1.0
        return {name: rates.get(name, average) for name in self._signals}


class TrainingMeans:
    """Means of the training of one domain. A step in which the domain had no trained token changes nothing."""

    def __init__(self, window: int, per: Literal["token", "response"] = "token") -> None:
        self._window, self._per = window, per
        self._steps = 0
        self._start, self._loss, self._slow = Mean(), Mean(window), Mean(2 * window)
        self._cut = Mean(window)
        self._least_cut = 1.0
        self.length = Mean(window)
        """Trained tokens for each prompt that was dealt out, whatever segments its episode has."""

    def record_means(self, stats: DomainRecord, cut: int, prompts: int) -> None:
        """Take in the next step's means, of which `cut` responses ended at their limit; the step took so many `prompts`."""
        if not stats.tokens:
            return
        self.length.add(stats.tokens, prompts)
        self._cut.add(min(cut, stats.samples), stats.samples)
        self._least_cut = min(self._least_cut, self._cut.value or 0.0)
        if stats.loss is not None:
            for mean in (self._loss, self._slow, *([self._start] if self._steps < self._window else ())):
                mean.add(stats.loss * stats.tokens, stats.tokens)
            self._steps += 1

    @property
    def gap(self) -> float:
        """Share that is left to learn, 1 in the first steps: distance * slope + cut.

        The slope is the loss divided by its mean over twice the window, which extrapolates by about a window: a domain that
        falls fast needs less, one that rises needs more. Cut responses count as far as their share is above the lowest that the
        domain had: a student that repeats itself to the limit has a small loss, but an expert may write to the limit, too.
        """
        loss, slow, start = (mean.value or 0.0 for mean in (self._loss, self._slow, self._start))
        if self._steps < self._window or start <= 0:
            return 1.0
        slope = min(loss / slow, STEEPEST) if slow > 0 else 1.0
        return self._relative_distance(max(0.0, loss), start) * slope + (self._cut.value or 0.0) - self._least_cut

    def _relative_distance(self, loss: float, start: float) -> float:
        """From 0, as the expert, to about 1, as in the first steps.

        Per token: the loss divided by that of the first steps, because domains do not start equally far from their experts.
        Per response: with x nats a response, a sure expert's response comes with probability exp(-x), so 1 - exp(-x) of them
        are missed. x / (1 + x) is close to it and needs no exponential. A domain of 22 tokens that each lack 0.05 nats misses
        two answers of three.
        """
        if self._per == "token":
            return loss / start
        nats = loss * (self.length.value or 0.0)
        return nats / (1 + nats)


class Mean:
    """A mean in which older steps count less, over about `window` steps; without a window all steps count the same."""

    def __init__(self, window: int | None = None) -> None:
        self._keep = 1 - 1 / window if window else 1.0
        self._total = self._count = 0.0

    def add(self, total: float, count: float) -> None:
        """Take in the next step's sum and what it is a sum over."""
        self._total = self._keep * self._total + total
        self._count = self._keep * self._count + count

    @property
    def value(self) -> float | None:
        """None before anything was added."""
        return self._total / self._count if self._count else None


def in_proportion(total: int, weights: Mapping[str, float]) -> dict[str, float]:
    """`total` in proportion to the weights, as real numbers."""
    assert total >= len(weights) > 0
    weight_sum = sum(weights.values())
    return {name: total * weight / weight_sum for name, weight in weights.items()}


def samples_by_weight(total: int, weights: Mapping[str, float]) -> dict[str, float]:
    """`total` samples in proportion to the weights, not yet whole, at least one each."""
    return at_least_one(in_proportion(total, weights), dict.fromkeys(weights, 1.0))


def at_least_one(base: Mapping[str, float], pull: Mapping[str, float]) -> dict[str, float]:
    """Return `fit_proportions` with no bounds but one: each domain gets at least one sample."""
    return fit_proportions(base, pull, dict.fromkeys(base, 1.0), dict.fromkeys(base, sum(base.values())))


def fit_proportions(
    base: Mapping[str, float], pull: Mapping[str, float], low: Mapping[str, float], high: Mapping[str, float]
) -> dict[str, float]:
    """Return numbers in proportion to `base * pull`, each within its bounds, with the same sum as `base`, for which they
    leave room.

    If no pull is above 0, all are alike.
    """
    strongest = max(pull.values())
    pulls = {name: max(own / strongest, LEAST_PULL) if strongest > 0 else 1.0 for name, own in pull.items()}
    targets = {name: number * pulls[name] for name, number in base.items()}

    def clip_scaled(scale: float) -> dict[str, float]:
        return {name: min(high[name], max(low[name], scale * number)) for name, number in targets.items()}

    total = sum(base.values())
    below, above = 0.0, max(high[name] / number for name, number in targets.items())
    while below < (middle := (below + above) / 2) < above:  # the sum grows with the scale: bisect to the last bit
        below, above = (middle, above) if sum(clip_scaled(middle).values()) < total else (below, middle)
    return clip_scaled(above)


def round_counts(exact: Mapping[str, float], total: int, draw: float) -> dict[str, int]:
    """Return whole numbers with the sum `total`, each the exact one rounded down or up; a random `draw` in 0..1 makes their
    means exact.

    Systematic sampling: the exact numbers lie end to end on a ruler, and each gets the marks 1 - draw, 2 - draw, ... on its
    piece.
    """
    counts: dict[str, int] = {}
    position, marks = 0.0, 0
    last = list(exact)[-1]
    for name, number in exact.items():
        position += number
        reached = total if name == last else math.floor(position + draw)
        counts[name], marks = reached - marks, reached
    return counts
