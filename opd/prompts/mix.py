"""The domain mix of each step: a function of (seed, step) or, if it is balanced, of the seed and the records of the steps before."""

from __future__ import annotations

import random
from array import array
from collections import Counter
from collections.abc import Mapping, Sequence

from opd.prompts.balance import Balance, round_counts
from opd.records.step import StepRecord
from opd.records.types import Prompt

GOLDEN = (5**0.5 - 1) / 2
"""Multiples of it, modulo 1, fill 0..1 as evenly as a sequence without an end can."""


def shuffle_numbers(count: int, seed: str) -> array[int]:
    """Return the numbers below `count` in an order that `seed` decides, the same in every process and release.

    The standard library hashes a string seed with SHA-512. An array holds a million numbers in 8 MB, a list in 40 MB; both
    are shuffled alike.
    """
    order = array("q", range(count))
    random.Random(seed).shuffle(order)
    return order


class MixedPrompts:
    """Every domain in every step, with the same share of each."""

    def __init__(
        self, by_domain: Mapping[str, Sequence[Prompt]], exact: Mapping[str, float], seed: int, n: int = 1
    ) -> None:
        """`exact` prompts of each domain in a step on average, each `n` times; together a whole number."""
        assert set(by_domain) == set(exact)
        self._domains = EndlessDomains(by_domain, seed, n)
        self._exact = exact
        self._total = round(sum(exact.values()))
        self._first_draw = random.Random(f"{seed}/mix").random()
        self._offsets = array("q", [0] * len(exact))
        """Running totals, step after step: the prompts of each domain before step 1, before step 2, and so on, as far as
        needed."""

    def take(self, step: int) -> list[Prompt]:
        """Return the prompts of one step (from 1), grouped by domain: a pure function of (seed, step)."""
        num = len(self._exact)
        for earlier in range(len(self._offsets) // num, step):
            counts = self._count_prompts(earlier).values()
            self._offsets.extend(offset + count for offset, count in zip(self._offsets[-num:], counts, strict=True))
        starts = self._offsets[(step - 1) * num : step * num]
        return self._domains.read(dict(zip(self._exact, starts, strict=True)), self._count_prompts(step))

    def _count_prompts(self, step: int) -> dict[str, int]:
        """Prompts of each domain in a step. What is left over by rounding down goes to other domains in each step."""
        return round_counts(self._exact, self._total, (self._first_draw + step * GOLDEN) % 1)


class BalancedPrompts:
    """Every domain in every step, with as many prompts as the balance says. Implements `PromptSource` and `Sink`.

    `take` depends on nothing but the seed and the records of the steps before, which arrive as they do at every sink. So a
    resume has no other state to restore: it passes the records that it finds in `metrics.jsonl`. Where prompts are taken
    ahead, those of a step depend on the records up to the one that is there when they are taken, and on no later one.
    """

    def __init__(
        self,
        by_domain: Mapping[str, Sequence[Prompt]],
        balance: Balance,
        seed: int,
        records: Sequence[StepRecord] = (),
        n: int = 1,
        ahead: int = 0,
    ) -> None:
        """`records` are those of the steps that an interrupted run has taken, from step 1. The balance deals out prompts; each
        comes `n` times, and they are taken `ahead` steps before the step is trained."""
        self._domains = EndlessDomains(by_domain, seed, n)
        self._balance = balance
        self._n = n
        self._offsets = Counter[str]()
        self._last = 0
        self._ahead = ahead
        self._counts = {step: balance.count_samples(step) for step in range(1, ahead + 2)}
        """Prompts by domain of the steps whose record has not come."""
        for record in records:
            self.step(record)

    def step(self, record: StepRecord) -> None:
        """Take in the record of the step that was taken last."""
        assert record.step == self._last + 1, f"the record of step {record.step} after that of {self._last}"
        self._last = record.step
        self._offsets.update({name: number // self._n for name, number in record.prompts.items()})
        del self._counts[record.step]
        self._balance.record_step(record)
        decided = record.step + 1 + self._ahead
        self._counts[decided] = self._balance.count_samples(decided)

    def take(self, step: int) -> list[Prompt]:
        """Return the prompts of a step after those whose records came in, grouped by domain."""
        assert step in self._counts, f"prompts of step {step} with records up to {self._last}"
        starts = Counter(self._offsets)
        for earlier in range(self._last + 1, step):
            starts.update(self._counts[earlier])
        return self._domains.read(starts, self._counts[step])


class EndlessDomains:
    """Each domain as a sequence without an end, in a fresh seeded order per epoch."""

    def __init__(self, by_domain: Mapping[str, Sequence[Prompt]], seed: int, n: int = 1) -> None:
        """`n`: times that each prompt comes, one after the other: once for each response."""
        self._by_domain = by_domain
        self._seed = seed
        self._n = n
        self._orders: dict[tuple[str, int], array[int]] = {}
        self._read: tuple[tuple[dict[str, int], dict[str, int]], list[Prompt]] = ({}, {}), []
        """The last request and its answer: a schedule that writes ahead takes the prompts of each step twice."""

    def read(self, starts: Mapping[str, int], counts: Mapping[str, int]) -> list[Prompt]:
        """`counts` prompts of each domain from its place in `starts`, domain after domain."""
        request = dict(starts), dict(counts)
        if request != self._read[0]:
            windows = (self._take_window(name, starts[name], count) for name, count in counts.items())
            self._read = request, [prompt for window in windows for prompt in window for _ in range(self._n)]
        return list(self._read[1])

    def _take_window(self, domain: str, start: int, count: int) -> list[Prompt]:
        prompts = self._by_domain[domain]
        return [
            prompts[self._epoch_order(domain, i // len(prompts))[i % len(prompts)]] for i in range(start, start + count)
        ]

    def _epoch_order(self, domain: str, epoch: int) -> array[int]:
        key = (domain, epoch)
        if key not in self._orders:
            order = shuffle_numbers(len(self._by_domain[domain]), f"{self._seed}/{domain}/{epoch}")
            # A step can reach from one epoch into the next: keep the order of the epoch before, drop older ones.
            self._orders = {k: v for k, v in self._orders.items() if k[0] != domain or k[1] >= epoch - 1} | {key: order}
        return self._orders[key]
