"""Greedy search over which layers keep their indexer, without training.

    every layer full ─→ for each full layer but the first: what would the loss be if it were shared? ─→ share the cheapest ─→ again

In a step all candidates go over a batch in one sweep: the layers are run once under the present pattern, and from the input of each candidate
a branch goes on to the end with this layer shared. So nothing before a candidate is computed again, and one state is in memory, not
one a layer. The sums after each batch are handed to the caller, who can go on from there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from opd.indexers.attention import mark_chosen
from opd.indexers.layers import LayerRunner, TextBatch
from opd.indexers.patterns import FULL, SHARED


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchStep:
    """One layer that gave up its indexer."""

    layer: int
    pattern: str
    """The pattern after the step."""
    loss: float
    """Loss of this pattern, nats a token."""
    candidates: dict[int, float]
    """Layer -> loss if that layer had been shared instead."""


@dataclass(slots=True, kw_only=True)
class SearchState:
    """All that a search has found out; plain values, so that JSON holds it."""

    pattern: str
    """The present pattern."""
    steps: list[SearchStep] = field(default_factory=list)
    batches_done: int = 0
    """Batches of the step in progress whose losses are in `sums`."""
    sums: dict[int, float] = field(default_factory=dict)
    """Candidate of the step in progress -> sum of the losses of its tokens."""


def search_pattern(
    runner: LayerRunner,
    batches: Sequence[TextBatch],
    num_full: int,
    state: SearchState,
    save: Callable[[SearchState], None],
) -> SearchState:
    """Share one layer after another until `num_full` are full, and return the state, which is changed in place. `save` is called after every
    batch and every step; from what it got, a search goes on to the same result. Of equal losses the lowest layer's counts.
    """
    num_tokens = count_tokens(batches)
    while state.pattern.count(FULL) > num_full:
        for batch in batches[state.batches_done :]:
            for layer, loss in _sum_candidate_losses(runner, batch, state.pattern).items():
                state.sums[layer] = state.sums.get(layer, 0.0) + loss
            state.batches_done += 1
            save(state)
        losses = {layer: total / num_tokens for layer, total in state.sums.items()}
        layer = min(losses, key=lambda layer: (losses[layer], layer))
        state.pattern = share_layer(state.pattern, layer)
        state.steps.append(SearchStep(layer=layer, pattern=state.pattern, loss=losses[layer], candidates=losses))
        state.batches_done, state.sums = 0, {}
        save(state)
    return state


def share_layer(pattern: str, layer: int) -> str:
    """Return the pattern with one more shared layer."""
    return pattern[:layer] + SHARED + pattern[layer + 1 :]


def count_tokens(batches: Sequence[TextBatch]) -> int:
    """Return the number of tokens whose prediction is counted."""
    return sum(int(batch.counted_B_T.sum()) for batch in batches)


@torch.no_grad()
def measure_loss(runner: LayerRunner, batches: Sequence[TextBatch], pattern: str) -> float:
    """Return the loss under a pattern, nats a token."""
    total = sum(runner.sum_loss(runner.run_layers(0, runner.embed(batch.ids_B_T), pattern), batch) for batch in batches)
    return total / count_tokens(batches)


@torch.no_grad()
def _sum_candidate_losses(runner: LayerRunner, batch: TextBatch, pattern: str) -> dict[int, float]:
    """Return, for each full layer but the first, the sum of a batch's losses if it were shared."""
    sums = {}
    state = runner.embed(batch.ids_B_T)
    last = pattern.rindex(FULL)
    for index in range(last + 1):
        if index and pattern[index] == FULL:
            sums[index] = runner.sum_loss(runner.run_layers(index, state, share_layer(pattern, index)), batch)
        state = runner.run_layer(index, state, pattern[index])
    return sums


@torch.no_grad()
def measure_overlaps(runner: LayerRunner, batches: Sequence[TextBatch]) -> list[float]:
    """Return, for each layer but the first, the share of its chosen tokens that the layer before chose too, under the model's own pattern.

    Only tokens count that have more tokens to read than an indexer chooses: before, all are chosen.
    """
    shared = torch.zeros(runner.num_layers - 1, dtype=torch.float64)
    total = 0
    for batch in batches:
        state, previous = runner.embed(batch.ids_B_T), None
        counts_B_T = _has_choice(batch, runner.topk)
        total += int(counts_B_T.sum()) * runner.topk
        for index in range(runner.num_layers):
            state = runner.run_layer(index, state, runner.pattern[index])
            assert state.chosen_B_T_K is not None
            chosen_B_T_S = mark_chosen(state.chosen_B_T_K, batch.ids_B_T.shape[1])
            if previous is not None:
                shared[index - 1] += float((chosen_B_T_S & previous)[counts_B_T].sum())
            previous = chosen_B_T_S
    return [float(value) / max(1, total) for value in shared]


def _has_choice(batch: TextBatch, topk: int) -> Tensor:
    """Return a mask [B, T], true at tokens that have more than `topk` tokens to read, themselves included."""
    places_T = torch.arange(batch.ids_B_T.shape[1], device=batch.ids_B_T.device)
    return (places_T >= topk) & (places_T < batch.lengths_B[:, None])


def count_choosing(batches: Sequence[TextBatch], topk: int) -> int:
    """Return the number of counted tokens that are predicted where an indexer had to choose."""
    return sum(int((_has_choice(b, topk)[:, :-1] & b.counted_B_T[:, 1:]).sum()) for b in batches)
