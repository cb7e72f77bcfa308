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
        self,
        prompts_by_domain: Mapping[str, Sequence[Prompt]],
        mean_counts: Mapping[str, float],
        seed: int,
        copies: int = 1,
        orders: Mapping[str, str] | None = None,
    ) -> None:
        """`mean_counts`: average number of prompts of each domain in a step; the sum is a whole number. `copies`: how often each prompt
        comes, once for each response to it. `orders`: see `EndlessDomains`."""
        assert set(prompts_by_domain) == set(mean_counts)
        self._domains = EndlessDomains(prompts_by_domain, seed, copies, orders)
        self._mean_counts = mean_counts
        self._total = round(sum(mean_counts.values()))
        self._first_draw = random.Random(f"{seed}/mix").random()
        self._offsets = array("q", [0] * len(mean_counts))
        """Row after row of a table, which grows on demand: for each step from 1 on, the prompts that were taken before it, by domain."""

    def take(self, step: int) -> list[Prompt]:
        """Return the prompts of a step (counted from 1), grouped by domain. They depend on the seed and the step alone."""
        num_domains = len(self._mean_counts)
        num_rows = len(self._offsets) // num_domains
        for last_step in range(num_rows, step):  # the table ends with the row of this step
            counts = self._count_prompts(last_step).values()
            last_row = self._offsets[-num_domains:]
            self._offsets.extend(offset + count for offset, count in zip(last_row, counts, strict=True))
        starts = self._offsets[(step - 1) * num_domains : step * num_domains]
        return self._domains.select(dict(zip(self._mean_counts, starts, strict=True)), self._count_prompts(step))

    def _count_prompts(self, step: int) -> dict[str, int]:
        """Return the number of prompts of each domain in a step. In each step other domains are rounded up."""
        return round_counts(self._mean_counts, self._total, (self._first_draw + step * GOLDEN) % 1)


class BalancedPrompts:
    """Takes prompts of every domain in every step; the balance decides how many. Implements `PromptSource` and `Sink`.

    The result of `take` depends only on the seed and the records of the steps before, which arrive by `step` as at every sink.
    So there is no state to save for a resume, which passes the records of `metrics.jsonl` to `__init__`. If the prompts of step s
    are taken `ahead` steps early, they depend on the records up to step s - ahead - 1, even if later ones have arrived.
    """

    def __init__(
        self,
        prompts_by_domain: Mapping[str, Sequence[Prompt]],
        balance: Balance,
        seed: int,
        records: Sequence[StepRecord] = (),
        copies: int = 1,
        ahead: int = 0,
        orders: Mapping[str, str] | None = None,
    ) -> None:
        """`records`: the records of the steps, from 1, that an interrupted run has taken. `copies`: how often each prompt comes, once for
        each response to it. `ahead`: number of steps before its training that a step's prompts are taken. `orders`: see
        `EndlessDomains`."""
        self._domains = EndlessDomains(prompts_by_domain, seed, copies, orders)
        self._balance = balance
        self._copies = copies
        self._last_recorded_step = 0
        self._offsets = Counter[str]()
        """Domain -> prompts that were taken up to the last recorded step."""
        self._ahead = ahead
        self._counts = {step: balance.count_samples(step) for step in range(1, ahead + 2)}
        """Step -> number of prompts of each domain, for the `ahead + 1` steps after the last recorded one."""
        for record in records:
            self.step(record)

    def step(self, record: StepRecord) -> None:
        """Take in the record of the next step, and decide the counts of the step `ahead + 1` steps later."""
        last_step = self._last_recorded_step
        assert record.step == last_step + 1, f"the record of step {record.step} after that of {last_step}"
        self._last_recorded_step = record.step
        self._offsets.update({name: number // self._copies for name, number in record.prompts.items()})
        del self._counts[record.step]
        self._balance.record_step(record)
        new_step = record.step + 1 + self._ahead
        self._counts[new_step] = self._balance.count_samples(new_step)

    def take(self, step: int) -> list[Prompt]:
        """Return the prompts of a step whose record has not come yet, grouped by domain."""
        assert step in self._counts, f"prompts of step {step} with records up to {self._last_recorded_step}"
        starts = Counter(self._offsets)
        for unrecorded_step in range(self._last_recorded_step + 1, step):
            starts.update(self._counts[unrecorded_step])
        return self._domains.select(starts, self._counts[step])


class EndlessDomains:
    """Each domain's prompts as an endless sequence: epoch after epoch, each in an order of its own that the seed decides."""

    def __init__(
        self,
        prompts_by_domain: Mapping[str, Sequence[Prompt]],
        seed: int,
        copies: int = 1,
        orders: Mapping[str, str] | None = None,
    ) -> None:
        """`copies`: how often each prompt comes in a row, once for each response to it. `orders`: domain -> name that seeds the orders of
        its prompts; default: its own."""
        self._order_names = orders or {}
        self._prompts_by_domain = prompts_by_domain
        self._seed = seed
        self._copies = copies
        self._orders: dict[tuple[str, int], array[int]] = {}
        """Domain and epoch, from 0 -> the order of the prompts in it."""
        # The last selection is kept, because a schedule that writes ahead takes the prompts of each step twice.
        self._last_request: tuple[dict[str, int], dict[str, int]] = {}, {}
        self._last_selection: list[Prompt] = []

    def select(self, starts: Mapping[str, int], counts: Mapping[str, int]) -> list[Prompt]:
        """Return `counts[domain]` prompts of each domain from the position `starts[domain]` on, domain after domain."""
        request = dict(starts), dict(counts)
        if request != self._last_request:
            windows = (self._select_window(name, starts[name], count) for name, count in counts.items())
            self._last_selection = [prompt for window in windows for prompt in window for _ in range(self._copies)]
            self._last_request = request
        return list(self._last_selection)

    def _select_window(self, domain: str, start: int, count: int) -> list[Prompt]:
        """Return the prompts at `count` positions of a domain's endless sequence."""
        prompts = self._prompts_by_domain[domain]
        positions = (divmod(position, len(prompts)) for position in range(start, start + count))
        return [prompts[self._order_epoch(domain, epoch)[index]] for epoch, index in positions]

    def _order_epoch(self, domain: str, epoch: int) -> array[int]:
        """Return the order of a domain's prompts in an epoch."""
        key = (domain, epoch)
        if key not in self._orders:
            order = shuffle_numbers(
                len(self._prompts_by_domain[domain]), f"{self._seed}/{self._order_names.get(domain, domain)}/{epoch}"
            )
            # A step can reach from one epoch into the next, so the order of the epoch before is kept, too.
            self._orders = {k: v for k, v in self._orders.items() if k[0] != domain or k[1] >= epoch - 1} | {key: order}
        return self._orders[key]
