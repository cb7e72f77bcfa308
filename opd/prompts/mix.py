"""The prompts of each step, mixed from all domains.

They depend on the seed and the step alone; with a balance, on the seed and the records of the steps before.
"""

from __future__ import annotations

import random
from array import array
from collections import Counter
from collections.abc import Mapping, Sequence

from opd.prompts.balance import Balance, round_counts
from opd.records.step import StepRecord
from opd.records.types import Prompt

GOLDEN = (5**0.5 - 1) / 2
"""The golden ratio minus 1. Its multiples, modulo 1, fill 0..1 as evenly as an endless sequence can."""


def shuffle_numbers(count: int, seed: str) -> array[int]:
    """Return the numbers below `count` in an order that `seed` decides, the same in every process and release.

    That is because the standard library hashes a string seed with SHA-512. The result is an array because it holds a million
    numbers in 8 MB, where a list needs 40 MB.
    """
    order = array("q", range(count))
    random.Random(seed).shuffle(order)
    return order


class MixedPrompts:
    """Takes prompts of every domain in every step; each domain has the same share in all steps."""

    def __init__(
        self, by_domain: Mapping[str, Sequence[Prompt]], exact: Mapping[str, float], seed: int, n: int = 1
    ) -> None:
        """`exact`: average number of prompts of each domain in a step; the sum is a whole number. Each prompt comes `n` times."""
        assert set(by_domain) == set(exact)
        self._domains = EndlessDomains(by_domain, seed, n)
        self._exact = exact
        self._total = round(sum(exact.values()))
        self._first_draw = random.Random(f"{seed}/mix").random()
        self._offsets = array("q", [0] * len(exact))
        """How many prompts of each domain were taken before step 1, then the same before step 2, and so on; it grows on
        demand."""

    def take(self, step: int) -> list[Prompt]:
        """Return the prompts of a step (counted from 1), grouped by domain. They depend on the seed and the step alone."""
        num = len(self._exact)
        for earlier in range(len(self._offsets) // num, step):
            counts = self._count_prompts(earlier).values()
            self._offsets.extend(offset + count for offset, count in zip(self._offsets[-num:], counts, strict=True))
        starts = self._offsets[(step - 1) * num : step * num]
        return self._domains.read(dict(zip(self._exact, starts, strict=True)), self._count_prompts(step))

    def _count_prompts(self, step: int) -> dict[str, int]:
        """Return the number of prompts of each domain in a step. In each step other domains are rounded up."""
        return round_counts(self._exact, self._total, (self._first_draw + step * GOLDEN) % 1)


class BalancedPrompts:
    """Takes prompts of every domain in every step; the balance decides how many. Implements `PromptSource` and `Sink`.

    What `take` returns depends only on the seed and the records of the steps before, which arrive by `step` as at every sink.
    So a resume has no further state to restore: it passes the records from `metrics.jsonl`. If prompts are taken ahead of
    their step, they depend on the records up to `ahead + 1` steps before it, whether later ones have arrived or not.
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
        """`records`: the records of the steps, from 1, that an interrupted run has taken. `n`: how often each prompt comes.
        `ahead`: how many steps before its training a step's prompts are taken."""
        self._domains = EndlessDomains(by_domain, seed, n)
        self._balance = balance
        self._n = n
        self._offsets = Counter[str]()
        self._last = 0
        self._ahead = ahead
        self._counts = {step: balance.count_samples(step) for step in range(1, ahead + 2)}
        """Step -> number of prompts of each domain, for decided steps whose record has not come yet."""
        for record in records:
            self.step(record)

    def step(self, record: StepRecord) -> None:
        """Take in the record of the next step, and decide the counts of the step `ahead + 1` steps later."""
        assert record.step == self._last + 1, f"the record of step {record.step} after that of {self._last}"
        self._last = record.step
        self._offsets.update({name: number // self._n for name, number in record.prompts.items()})
        del self._counts[record.step]
        self._balance.record_step(record)
        decided = record.step + 1 + self._ahead
        self._counts[decided] = self._balance.count_samples(decided)

    def take(self, step: int) -> list[Prompt]:
        """Return the prompts of a step whose record has not come yet, grouped by domain."""
        assert step in self._counts, f"prompts of step {step} with records up to {self._last}"
        starts = Counter(self._offsets)
        for earlier in range(self._last + 1, step):
            starts.update(self._counts[earlier])
        return self._domains.read(starts, self._counts[step])


class EndlessDomains:
    """Each domain's prompts as an endless sequence: epoch after epoch, each in an order of its own that the seed decides."""

    def __init__(self, by_domain: Mapping[str, Sequence[Prompt]], seed: int, n: int = 1) -> None:
        """`n`: how often each prompt comes in a row, once for each response to it."""
        self._by_domain = by_domain
        self._seed = seed
        self._n = n
        self._orders: dict[tuple[str, int], array[int]] = {}
        self._read: tuple[tuple[dict[str, int], dict[str, int]], list[Prompt]] = ({}, {}), []
        """The last request and its result, because a schedule that writes ahead takes the prompts of each step twice."""

    def read(self, starts: Mapping[str, int], counts: Mapping[str, int]) -> list[Prompt]:
        """Return `counts[domain]` prompts of each domain from the position `starts[domain]` on, domain after domain."""
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
            # A step can reach from one epoch into the next, so the order of the epoch before is kept, too.
            self._orders = {k: v for k, v in self._orders.items() if k[0] != domain or k[1] >= epoch - 1} | {key: order}
        return self._orders[key]
