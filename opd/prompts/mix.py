"""The domain mix of each step: a pure function of (seed, step)."""

from __future__ import annotations

import random
from array import array
from collections.abc import Mapping, Sequence

from opd.types import Prompt


def split_samples(total: int, weights: Mapping[str, float]) -> dict[str, int]:
    """Deal `total` samples out in proportion to the weights, at least one each, by largest remainder."""
    assert total >= len(weights) > 0
    spare = total - len(weights)
    exact = {name: spare * weight / sum(weights.values()) for name, weight in weights.items()}
    counts = {name: 1 + int(share) for name, share in exact.items()}
    by_remainder = sorted(exact, key=lambda name: (int(exact[name]) - exact[name], name))
    for name in by_remainder[: total - sum(counts.values())]:
        counts[name] += 1
    return counts


def shuffled(count: int, seed: str) -> array[int]:
    """The numbers below `count` in an order that `seed` decides, the same in every process and release.

    The standard library hashes a string seed with SHA-512. An array holds a million numbers in 8 MB, a list in 40 MB; both
    are shuffled alike.
    """
    order = array("q", range(count))
    random.Random(seed).shuffle(order)
    return order


class MixedPrompts:
    """Every domain in every step. Each domain is read in a fresh seeded order per epoch, as an endless sequence.

    `take(step)` depends on nothing but (seed, step): resuming needs no stored cursor.
    """

    def __init__(self, by_domain: Mapping[str, Sequence[Prompt]], counts: Mapping[str, int], seed: int) -> None:
        assert set(by_domain) == set(counts)
        self._by_domain = by_domain
        self._counts = counts
        self._seed = seed
        self._orders: dict[tuple[str, int], array[int]] = {}

    def take(self, step: int) -> list[Prompt]:
        """The prompts of one step (from 1), grouped by domain."""
        return [
            prompt
            for domain, count in self._counts.items()
            for prompt in self._window(domain, (step - 1) * count, count)
        ]

    def _window(self, domain: str, start: int, count: int) -> list[Prompt]:
        prompts = self._by_domain[domain]
        return [prompts[self._order(domain, i // len(prompts))[i % len(prompts)]] for i in range(start, start + count)]

    def _order(self, domain: str, epoch: int) -> array[int]:
        key = (domain, epoch)
        if key not in self._orders:
            order = shuffled(len(self._by_domain[domain]), f"{self._seed}/{domain}/{epoch}")
            # A step can reach from one epoch into the next: keep the order of the epoch before, drop older ones.
            self._orders = {k: v for k, v in self._orders.items() if k[0] != domain or k[1] >= epoch - 1} | {key: order}
        return self._orders[key]
