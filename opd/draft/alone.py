"""A draft that learns from a model that stays as it is: the model reads each text once, and its states are kept.

Shapes: as in `opd.draft.companion`.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from opd.draft.companion import DraftCompanion, DraftSpec
from opd.machine.devices import to_device
from opd.records.types import Rollout
from opd.train.batch import MicroBatch, build_unscored_batch
from opd.train.companions import StudentView

CHUNK = 256
"""Tokens whose logits exist at one time."""


@dataclass(frozen=True, slots=True)
class KnownBatch:
    """A micro-batch, and what the model computes for it."""

    batch: MicroBatch
    hidden: Mapping[int, Tensor]
    """The states that the draft reads, see `opd.train.companions.Companion.layers`."""
    last_N_D: Tensor
    """Last states at the positions that predict the trained tokens."""


class FrozenModel:
    """A model of transformers, and the batches that it has read."""

    def __init__(self, model: Any, layers: Sequence[int]) -> None:
        self.lm = model
        self._head_V_D: Tensor = model.get_output_embeddings().weight.detach()
        self._reader = SimpleNamespace(layers=layers)

    def read_batches(self, rollouts: Sequence[Rollout], size: int) -> list[KnownBatch]:
        """Read rollouts, `size` of them at a time."""
        return [self._read_batch(rollouts[first : first + size]) for first in range(0, len(rollouts), size)]

    def _read_batch(self, rollouts: Sequence[Rollout]) -> KnownBatch:
        batch = build_unscored_batch(rollouts, "padded")
        view = StudentView([self._reader])
        with torch.no_grad(), view.watch_layers(self.lm):
            moved = to_device(batch, self.lm.device)
            states = self.lm.base_model(**moved.packed.inputs(self.lm.dtype)).last_hidden_state.flatten(0, 1)
        return KnownBatch(batch, dict(view.hidden), states[moved.predict_N])

    def show_logits(self, known: KnownBatch, companion: DraftCompanion) -> None:
        """Let a draft choose its windows in the batch, and read the logits there."""
        companion.begin_batch(known.batch)
        for first in range(0, len(known.last_N_D), CHUNK):
            rows = slice(first, min(first + CHUNK, len(known.last_N_D)))
            if companion.needs_logits(rows):
                companion.read_logits(rows, (known.last_N_D[rows] @ self._head_V_D.T).float())


def train_draft(
    model: FrozenModel,
    spec: DraftSpec,
    batches: Sequence[KnownBatch],
    steps: int,
    tell: Callable[[int, Mapping[str, float]], None] = lambda step, numbers: None,
) -> DraftCompanion:
    """Train a draft for `steps` steps of one batch each, and return it. `tell` gets the numbers of each step."""
    options: Any = SimpleNamespace(world_size=1)
    companion = spec.start(options, 0, model, model.lm.device)
    order = _shuffle_endlessly(batches, spec.seed)
    for step in range(1, steps + 1):
        known = next(order)
        model.show_logits(known, companion)
        companion.add_gradients(known.batch, known.hidden, _equal_weights(known))
        tell(step, companion.take_step(step, 1.0))
    return companion


def measure_draft(model: FrozenModel, companion: DraftCompanion, batches: Sequence[KnownBatch]) -> dict[str, float]:
    """Return the numbers of `opd.draft.sums.DraftSums.summarise` on batches that the draft does not learn from."""
    for known in batches:
        model.show_logits(known, companion)
        companion.measure(known.batch, known.hidden, _equal_weights(known))
    return companion.take_numbers()


def _equal_weights(known: KnownBatch) -> Tensor:
    return torch.ones(len(known.last_N_D), device=known.last_N_D.device)


def _shuffle_endlessly(batches: Sequence[KnownBatch], seed: int) -> Iterator[KnownBatch]:
    """Yield all batches in another order each time round."""
    rng = random.Random(seed)
    while True:
        yield from rng.sample(list(batches), len(batches))
