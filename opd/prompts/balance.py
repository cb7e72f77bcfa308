"""Decides how many samples of a step each domain gets, from the records of the steps before.

    records ──▶ signals of each domain ──▶ real numbers of samples ──▶ whole numbers
                (loss, slope, cut, length)  (within floor and cap)      (right on average)

Only training decides, never an exam. The numbers depend on the section, the weights, the seed and the records of the steps
before. A resume has these records, so it takes the same prompts. The arithmetic has no powers and logarithms, because their
last bits differ between machines.
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping
from typing import Literal

from opd.config.balance import GapBalance, TokensBalance
from opd.records.step import DomainRecord, StepRecord

LEAST_PULL = 1e-6
"""Smallest pull of a domain, as a share of the strongest pull; the bisection needs numbers above 0."""

STEEPEST = 2.0
"""Largest slope that counts. A divergence does not rise faster; but one estimated from sampled tokens can be near 0 by
chance, and then the quotient would be huge."""


class Balance:
    """Decides the number of samples of each domain, step by step."""

    def __init__(
        self, section: TokensBalance | GapBalance, weights: Mapping[str, float], total: int, seed: int
    ) -> None:
        """`total`: samples in each step, at least one for each domain. `weights`: the `weight` of each domain."""
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
        """Return the samples of each domain in the next step as real numbers, which add up to the total."""
        section, counts = self._section, in_proportion(self._total, self._weights)
        if isinstance(section, GapBalance):
            gaps = {name: signals.gap for name, signals in self._signals.items()}
            # If tokens are shared out, `at_least_one` below sees to one sample for each domain.
            least, samples_by_domain = (
                (1.0, samples_by_weight(self._total, self._weights)) if section.of == "samples" else (0.0, counts)
            )
            low = {name: max(least, section.floor * samples) for name, samples in samples_by_domain.items()}
            high = {name: section.cap * samples for name, samples in samples_by_domain.items()}
            counts = fit_proportions(counts, gaps, low, high)
        return at_least_one(counts, self._prompts_per_token()) if section.of == "tokens" else counts

    def count_samples(self, step: int) -> dict[str, int]:
        """Return the samples of each domain in the next step, as whole numbers. `step` is that step; it seeds the rounding."""
        return round_counts(self.exact_counts(), self._total, random.Random(f"{self._seed}/balance/{step}").random())

    def _prompts_per_token(self) -> dict[str, float]:
        """Return the prompts per trained token of each domain; one that has not been trained yet gets the others' average."""
        rates = {name: 1 / length for name, signals in self._signals.items() if (length := signals.length.value)}
        average = sum(rates.values()) / len(rates) if rates else 1.0
        return {name: rates.get(name, average) for name in self._signals}


class TrainingMeans:
    """Running means of one domain's training. A step in which the domain had no trained token changes nothing."""

    def __init__(self, window: int, per: Literal["token", "response"] = "token") -> None:
        self._window, self._per = window, per
        self._steps = 0
        # Of the loss: over the first `window` steps, over the last ones, and over twice as many.
        self._start, self._loss, self._slow = Mean(), Mean(window), Mean(2 * window)
        self._cut = Mean(window)
        self._least_cut = 1.0
        self.length = Mean(window)
        """Trained tokens per prompt, however many segments the prompt's episode has."""

    def record_means(self, stats: DomainRecord, cut: int, prompts: int) -> None:
        """Take in a step's numbers: `stats` of its samples, of which `cut` ended at their limit, and the number of `prompts`."""
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
        """Amount that is left to learn: distance * slope + cut, and 1 in the first `window` steps.

        The distance is that of `_relative_distance`. The slope is the loss divided by its mean over twice the window, which
        extrapolates by about a window: a domain whose loss falls fast needs less, one whose loss rises needs more. `cut` is by
        how much the share of cut responses is above the lowest that the domain had. It is there because a student that
        repeats itself to the limit has a small loss; and relative, because an expert may write to the limit too.
        """
        loss, slow, start = (mean.value or 0.0 for mean in (self._loss, self._slow, self._start))
        if self._steps < self._window or start <= 0:
            return 1.0
        slope = min(loss / slow, STEEPEST) if slow > 0 else 1.0
        return self._relative_distance(max(0.0, loss), start) * slope + (self._cut.value or 0.0) - self._least_cut

    def _relative_distance(self, loss: float, start: float) -> float:
        """Return the distance from the expert: 0 at the expert, about 1 in the first steps.

        Per token it is the loss divided by that of the first steps, because domains do not start equally far from their
        experts. Per response: at x nats per response, the student gives a sure expert's response with probability exp(-x),
        so it misses 1 - exp(-x) of them. x / (1 + x) is close to that and needs no exponential. For example, a response of 22
        tokens with 0.05 nats each is missed in two cases of three by the exact formula.
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
        """Take in the next step: a sum and the number of things in it."""
        self._total = self._keep * self._total + total
        self._count = self._keep * self._count + count

    @property
    def value(self) -> float | None:
        """The mean; None before anything was added."""
        return self._total / self._count if self._count else None


def in_proportion(total: int, weights: Mapping[str, float]) -> dict[str, float]:
    """Return real numbers in proportion to the weights, with the sum `total`."""
    assert total >= len(weights) > 0
    weight_sum = sum(weights.values())
    return {name: total * weight / weight_sum for name, weight in weights.items()}


def samples_by_weight(total: int, weights: Mapping[str, float]) -> dict[str, float]:
    """Return real numbers of samples in proportion to the weights, each at least 1, with the sum `total`."""
    return at_least_one(in_proportion(total, weights), dict.fromkeys(weights, 1.0))


def at_least_one(base: Mapping[str, float], pull: Mapping[str, float]) -> dict[str, float]:
    """Return `fit_proportions` with one bound only: each domain gets at least one sample."""
    return fit_proportions(base, pull, dict.fromkeys(base, 1.0), dict.fromkeys(base, sum(base.values())))


def fit_proportions(
    base: Mapping[str, float], pull: Mapping[str, float], low: Mapping[str, float], high: Mapping[str, float]
) -> dict[str, float]:
    """Return numbers in proportion to `base * pull`, each between `low` and `high`, with the same sum as `base`.

    The bounds have to allow that sum. If no pull is above 0, all pulls count as equal.
    """
    strongest = max(pull.values())
    pulls = {name: max(own / strongest, LEAST_PULL) if strongest > 0 else 1.0 for name, own in pull.items()}
    targets = {name: number * pulls[name] for name, number in base.items()}

    def clip_scaled(scale: float) -> dict[str, float]:
        return {name: min(high[name], max(low[name], scale * number)) for name, number in targets.items()}

    total = sum(base.values())
    below, above = 0.0, max(high[name] / number for name, number in targets.items())
    # The sum grows with the scale, so bisect, until no number lies between the two ends.
    while below < (middle := (below + above) / 2) < above:
        below, above = (middle, above) if sum(clip_scaled(middle).values()) < total else (below, middle)
    return clip_scaled(above)


def round_counts(exact: Mapping[str, float], total: int, draw: float) -> dict[str, int]:
    """Return whole numbers with the sum `total`, each the exact number rounded down or up.

    With a random `draw` from 0 to 1, the mean over many draws is the exact number. This is systematic sampling: the exact
    numbers are laid end to end on a ruler, and each gets as many as there are marks 1 - draw, 2 - draw, ... on its piece.
    """
    counts: dict[str, int] = {}
    position, marks = 0.0, 0
    last = list(exact)[-1]
    for name, number in exact.items():
        position += number
        reached = total if name == last else math.floor(position + draw)
        counts[name], marks = reached - marks, reached
    return counts
