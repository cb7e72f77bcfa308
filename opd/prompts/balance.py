"""How many samples of a step each domain gets, from what the steps before it showed.

    records ──▶ signals of each domain ──▶ real numbers of samples ──▶ whole numbers
                (loss, slope, cut, length)  (within floor and cap)      (right on average)

Training alone tells, never an exam. All of it is a function of section, weights, seed and the records of the steps before, so
a resume, which has these records, takes the same prompts. Nothing but sums, products and quotients: other machines come to
the same numbers.
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping

from opd.config.balance import GapBalance, TokensBalance
from opd.step_record import DomainRecord, StepRecord

LEAST_PULL = 1e-6
"""Of the strongest: a domain with nothing left to learn still has a place in the order."""

STEEPEST = 2.0
"""Of a divergence the loss cannot be more times its mean over twice the window; of an estimate, which may be negative, it can."""


class Balance:
    """The domains' numbers of samples, step by step."""

    def __init__(
        self, section: TokensBalance | GapBalance, weights: Mapping[str, float], total: int, seed: int
    ) -> None:
        """`total` samples in each step, at least one for each domain."""
        assert total >= len(weights) > 0
        spare, whole = total - len(weights), sum(weights.values())
        self._section = section
        self._seed = seed
        self._total = total
        self._by_weight = {name: 1 + spare * weight / whole for name, weight in weights.items()}
        self._signals = {name: Signals(section.window) for name in weights}

    def see(self, record: StepRecord) -> None:
        """Take in the next step's record."""
        for name, stats in record.domains.items():
            self._signals[name].see(stats, record.truncated_by_domain.get(name, 0))

    def exact(self) -> dict[str, float]:
        """Samples of each domain in the next step, not yet whole; they add up to the total."""
        found, section = self._by_weight, self._section
        if isinstance(section, GapBalance):
            gaps = {name: signals.gap for name, signals in self._signals.items()}
            low = {name: max(1.0, section.floor * samples) for name, samples in found.items()}
            high = {name: section.cap * samples for name, samples in found.items()}
            found = fitted(found, gaps, low, high)
        if section.of == "tokens":
            found = fitted(
                found, self._shortness(), dict.fromkeys(found, 1.0), dict.fromkeys(found, float(self._total))
            )
        return dict(found)

    def counts(self, step: int) -> dict[str, int]:
        """Samples of each domain in the next step, which is `step`."""
        return rounded(self.exact(), self._total, random.Random(f"{self._seed}/balance/{step}").random())

    def _shortness(self) -> dict[str, float]:
        """Samples that make a token; a domain that has not been seen yet is as long as the others on average."""
        known = {name: 1 / length for name, signals in self._signals.items() if (length := signals.length.value)}
        usual = sum(known.values()) / len(known) if known else 1.0
        return {name: known.get(name, usual) for name in self._signals}


class Signals:
    """What training shows of one domain. A step in which it had no trained token says nothing."""

    def __init__(self, window: int) -> None:
        self._window = window
        self._seen = 0
        self._start, self._loss, self._slow = Mean(), Mean(window), Mean(2 * window)
        self._cut = Mean(window)
        self._least_cut = 1.0
        self.length = Mean(window)
        """Trained tokens of a response."""

    def see(self, stats: DomainRecord, cut: int) -> None:
        """Take in the next step's means, of which `cut` responses ended at their limit."""
        if not stats.tokens:
            return
        self.length.add(stats.tokens, stats.samples)
        self._cut.add(min(cut, stats.samples), stats.samples)
        self._least_cut = min(self._least_cut, self._cut.value or 0.0)
        if stats.loss is not None:
            for mean in (self._loss, self._slow, *([self._start] if self._seen < self._window else ())):
                mean.add(stats.loss * stats.tokens, stats.tokens)
            self._seen += 1

    @property
    def gap(self) -> float:
        """What is left to learn, 1 at the start: loss / start * slope + cut.

        The loss against that of the first steps, because domains are not equally far away in nats; times its slope, the
        loss against its mean over twice the window, which carries it on for about a window: what falls fast needs less, what
        rises needs more. The share of cut responses counts as far as it is above the domain's best: a student that has lost
        its way goes on and on, with a small loss, while a domain whose expert writes to the limit has always been cut.
        """
        loss, slow, start = (mean.value or 0.0 for mean in (self._loss, self._slow, self._start))
        if self._seen < self._window or start <= 0:
            return 1.0
        slope = min(loss / slow, STEEPEST) if slow > 0 else 1.0
        return max(0.0, loss) / start * slope + (self._cut.value or 0.0) - self._least_cut


class Mean:
    """A mean to which each step counts less than the one after it, over about `window` steps; None: all count the same."""

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


def fitted(
    base: Mapping[str, float], pull: Mapping[str, float], low: Mapping[str, float], high: Mapping[str, float]
) -> dict[str, float]:
    """In proportion to `base * pull`, as far as the bounds let them, numbers that add up to what `base` does.

    The bounds enclose `base`. Where nothing pulls, `base` it stays.
    """
    strongest = max(pull.values())
    if strongest <= 0:
        return dict(base)
    wanted = {name: number * max(pull[name] / strongest, LEAST_PULL) for name, number in base.items()}

    def at(scale: float) -> dict[str, float]:
        return {name: min(high[name], max(low[name], scale * number)) for name, number in wanted.items()}

    total = sum(base.values())
    below, above = 0.0, max(high[name] / number for name, number in wanted.items())
    while below < (middle := (below + above) / 2) < above:  # their sum grows with the scale: halved until floats end
        below, above = (middle, above) if sum(at(middle).values()) < total else (below, middle)
    return at(above)


def rounded(exact: Mapping[str, float], total: int, draw: float) -> dict[str, int]:
    """Whole numbers with the sum `total`, each next to its exact one, and over all draws in 0..1 that one on average.

    Systematic sampling: the numbers laid end to end on a ruler, each gets the marks at 1 - draw, 2 - draw, ... on its piece.
    """
    found: dict[str, int] = {}
    place, marks = 0.0, 0
    last = list(exact)[-1]
    for name, number in exact.items():
        place += number
        reached = total if name == last else math.floor(place + draw)
        found[name], marks = reached - marks, reached
    return found
