"""Lengths of prompts and responses: stated, not read from prompts."""

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
    """The lengths of one step: each prompt's responses, in tokens."""

    prompt: int
    groups: tuple[tuple[int, ...], ...]
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
        """What is laid out together, and its responses: a response with its prompt, or trees of responses to one prompt."""
        pairs = []
        for number, (domain, group) in enumerate(zip(self.domains, self.groups, strict=True)):
            for tree, responses in enumerate(_share_prompts(self.prompt, group)):
                size = self.prompt + sum(responses)
                other_ids = tuple(f"{number}/{tree}/{i}" for i in range(1, len(responses)))
                pairs.append((RowSize(f"{number}/{tree}/0", domain, size, other_ids), responses))
        return pairs


def draw_responses(config: PipelineConfig, models: Models, lengths: LengthsSpec, step: int) -> StepLengths:
    """Draw the responses of one step: the same for the same seed and step."""
    chance = random.Random(f"{lengths.seed}/plan/{step}")
    median, prompt = stated_lengths(config, lengths)
    sigma = math.log(lengths.tail) / HUNDREDTH
    groups, domains = [], []
    for domain, samples in models.samples.items():
        for _ in range(samples // config.rollout.n):
            drawn = (median * math.exp(sigma * chance.gauss(0, 1)) for _ in range(config.rollout.n))
            groups.append(tuple(min(config.rollout.max_new_tokens, max(1, round(length))) for length in drawn))
            domains.append(domain)
    return StepLengths(prompt=prompt, groups=tuple(groups), domains=tuple(domains))


def stated_lengths(config: PipelineConfig, lengths: LengthsSpec) -> tuple[float, int]:
    """(median of responses, tokens of a prompt), with the defaults that the pipeline's limits give."""
    rollout = config.rollout
    prompt = lengths.prompt or max(1, rollout.max_model_len - rollout.max_new_tokens)
    return min(lengths.response or rollout.max_new_tokens, rollout.max_new_tokens), prompt


def _share_prompts(prompt: int, group: Sequence[int]) -> list[tuple[int, ...]]:
    """Responses to one prompt, as many beside each other as a tree may have."""
    limit = compute_tree_limit(prompt + max(group))
    trees: list[list[int]] = []
    size = limit
    for length in group:
        size += length
        if size > limit:
            trees.append([])
            size = prompt + length
        trees[-1].append(length)
    return [tuple(tree) for tree in trees]
