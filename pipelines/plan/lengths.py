"""Lengths of the prompts and responses of a planned merge: drawn from what the spec states, not read from prompts."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from opd.config import PipelineConfig
from opd.models.packing import compute_tree_limit
from opd.train.plan import RowSize
from pipelines.plan.models import Models
from pipelines.plan.spec import LengthsSpec

HUNDREDTH = 2.3263
"""Standard deviations above the mean of a normal distribution's 99th percentile."""


@dataclass(frozen=True, kw_only=True)
class StepLengths:
    """Lengths of all prompts and responses of one step, in tokens."""

    prompt: int
    """Tokens of each prompt."""
    groups: tuple[tuple[int, ...], ...]
    """For each prompt the tokens of its responses."""
    domains: tuple[str, ...]
    """Domain of each prompt."""

    @property
    def responses(self) -> list[int]:
        return [length for group in self.groups for length in group]

    @property
    def tokens(self) -> int:
        """Prompt and response tokens of all rows."""
        return sum(self.prompt + length for length in self.responses)

    @cached_property
    def units(self) -> list[tuple[RowSize, tuple[int, ...]]]:
        """Units that the trainer lays out together, each with the tokens of its responses: a response with its prompt, or a tree of
        responses to one prompt."""
        pairs = []
        for number, (domain, group) in enumerate(zip(self.domains, self.groups, strict=True)):
            for tree, responses in enumerate(_cut_into_trees(self.prompt, group)):
                size = self.prompt + sum(responses)
                other_ids = tuple(f"{number}/{tree}/{i}" for i in range(1, len(responses)))
                pairs.append((RowSize(f"{number}/{tree}/0", domain, size, other_ids), responses))
        return pairs


def draw_responses(config: PipelineConfig, models: Models, lengths: LengthsSpec, step: int) -> StepLengths:
    """Draw the lengths of one step, lognormal and cut at `rollout.max_new_tokens`; the same seed and step give the same."""
    rng = random.Random(f"{lengths.seed}/plan/{step}")
    median, prompt = stated_lengths(config, lengths)
    # `tail` is the 99th percentile over the median, of which the logarithm is so many standard deviations.
    sigma = math.log(lengths.tail) / HUNDREDTH
    groups, domains = [], []
    for domain, samples in models.samples.items():
        for _ in range(samples // config.rollout.n):
            draws = (median * math.exp(sigma * rng.gauss(0, 1)) for _ in range(config.rollout.n))
            groups.append(tuple(min(config.rollout.max_new_tokens, max(1, round(length))) for length in draws))
            domains.append(domain)
    return StepLengths(prompt=prompt, groups=tuple(groups), domains=tuple(domains))


def stated_lengths(config: PipelineConfig, lengths: LengthsSpec) -> tuple[float, int]:
    """Return (median tokens of a response, tokens of a prompt): as stated, or by default what the pipeline's limits allow."""
    rollout = config.rollout
    prompt = lengths.prompt or max(1, rollout.max_model_len - rollout.max_new_tokens)
    return min(lengths.response or rollout.max_new_tokens, rollout.max_new_tokens), prompt


def _cut_into_trees(prompt: int, group: Sequence[int]) -> list[tuple[int, ...]]:
    """Return the responses to one prompt in trees, in order: as many in each as the limit of its columns allows."""
    limit = compute_tree_limit(prompt + max(group))
    trees: list[list[int]] = []
    size = limit  # so that the first response begins a tree
    for length in group:
        size += length
        if size > limit:
            trees.append([])
            size = prompt + length
        trees[-1].append(length)
    return [tuple(tree) for tree in trees]
