"""Train the indexers of a model whose other weights stay as they are."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from opd.indexers.distillation import DistillationSums, distil_indexer, run_groups
from opd.indexers.layers import LayerRunner, TextBatch, TextRow
from opd.indexers.patterns import FULL
from opd.train.optimizer import AdamWOptions, build_adamw
from opd.train.schedule import LearningRate


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexerTrainingSpec:
    """Settings of a training."""

    steps: int
    """Steps of the dense stage, in which the model attends to all tokens and all count."""
    sparse_steps: int
    """Steps of the sparse stage after it, in which the model attends to the chosen tokens and these count."""
    batch_size: int
    """Rows of a step."""
    lr: float
    """Highest learning rate of the dense stage."""
    sparse_lr: float
    """Highest learning rate of the sparse stage."""
    chunk: int
    """Queries whose weights are in memory together."""
    seed: int = 0
    """Seed of the order of the rows."""


ADAMW = AdamWOptions(betas=(0.9, 0.95), epsilon=1e-8, weight_decay=0.0)
WARM_UP = 10
"""Steps of a stage in which the rate rises; a tenth of a short one."""


class IndexerTraining:
    """Indexers that learn, as copies in float32 beside the model: its own may be narrower."""

    def __init__(self, runner: LayerRunner, pattern: str, spec: IndexerTrainingSpec) -> None:
        """`pattern`: the pattern to train for; its full layers have indexers in the model."""
        self._runner, self._pattern, self._spec = runner, pattern, spec
        full = [i for i, letter in enumerate(pattern) if letter == FULL]
        self._copies = {i: copy.deepcopy(runner.attention(i).indexer).float().requires_grad_(True) for i in full}

    def train(self, rows: Sequence[TextRow]) -> Iterator[tuple[int, Mapping[int, DistillationSums]]]:
        """Train both stages; yields each step, counted from 1, with the sums of every layer that has an indexer, before its update."""
        batches = self._draw_batches(rows)
        stages = ((True, self._spec.steps, self._spec.lr), (False, self._spec.sparse_steps, self._spec.sparse_lr))
        done = 0
        for dense, steps, lr in stages:
            optimizer = build_adamw(nn.ModuleList(self._copies.values()), ADAMW, lr=lr)
            rate = LearningRate(peak=lr, steps=steps, warmup_steps=min(WARM_UP, steps // 10), decay="cosine")
            for step in range(1, steps + 1):
                for group in optimizer.param_groups:
                    group["lr"] = rate.rate_at_step(step)
                optimizer.zero_grad()
                sums = self.measure(next(batches), dense=dense, train=True)
                optimizer.step()
                self._install_weights()
                done += 1
                yield done, sums

    def measure(self, batch: TextBatch, *, dense: bool, train: bool = False) -> dict[int, DistillationSums]:
        """Return layer -> the sums of a batch; with `train` the gradients of their means are added to the indexers."""
        num_queries = int((batch.lengths_B - 1).sum()) if train else None
        return {
            served.layer: distil_indexer(
                served, self._runner.topk, dense=dense, chunk=self._spec.chunk, num_queries=num_queries
            )
            for served in run_groups(self._runner, batch, self._pattern, dense=dense, indexers=self._copies)
        }

    def state(self) -> dict[int, dict[str, Any]]:
        """Return layer -> name -> tensor of the indexers, in float32."""
        return {layer: indexer.state_dict() for layer, indexer in self._copies.items()}

    @torch.no_grad()
    def _install_weights(self) -> None:
        """Have the model choose by the new weights."""
        for layer, indexer in self._copies.items():
            for own, new in zip(self._runner.attention(layer).indexer.parameters(), indexer.parameters(), strict=True):
                own.copy_(new)

    def _draw_batches(self, rows: Sequence[TextRow]) -> Iterator[TextBatch]:
        """Yield batches without end; each row comes once before any comes again."""
        generator = torch.Generator().manual_seed(self._spec.seed)
        order: list[int] = []
        while True:
            while len(order) < self._spec.batch_size:
                order += torch.randperm(len(rows), generator=generator).tolist()
            drawn, order = order[: self._spec.batch_size], order[self._spec.batch_size :]
            yield TextBatch.of_rows([rows[i] for i in drawn], self._runner.device)
