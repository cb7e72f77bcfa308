"""Train the indexers of a model whose other weights stay as they are."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

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
_ADAM = "adamw."
"""Beginning of the names of the optimiser's tensors in a state."""
WARM_UP = 10
"""Steps of a stage in which the rate rises; a tenth of a short one."""


class IndexerTraining:
    """Indexers that learn, as copies in float32 beside the model: its own may be narrower."""

    def __init__(self, runner: LayerRunner, pattern: str, spec: IndexerTrainingSpec) -> None:
        """`pattern`: the pattern to train for; its full layers have indexers in the model."""
        self._runner, self._pattern, self._spec = runner, pattern, spec
        full = [i for i, letter in enumerate(pattern) if letter == FULL]
        self._copies = nn.ModuleDict({str(i): copy.deepcopy(runner.attention(i).indexer).float() for i in full})
        self._copies.requires_grad_(True)
        self._begin_stage()
        self.steps_done = 0
        """Steps of both stages that were taken."""

    def train(self, rows: Sequence[TextRow]) -> Iterator[Mapping[int, DistillationSums]]:
        """Take the steps that are left; yields after each the sums of every layer that has an indexer, as they were before its update."""
        spec = self._spec
        while self.steps_done < spec.steps + spec.sparse_steps:
            dense = self.steps_done < spec.steps
            if self.steps_done == spec.steps:
                self._begin_stage()
            start, steps, lr = (0, spec.steps, spec.lr) if dense else (spec.steps, spec.sparse_steps, spec.sparse_lr)
            rate = LearningRate(peak=lr, steps=steps, warmup_steps=min(WARM_UP, steps // 10), decay="cosine")
            for group in self._optimizer.param_groups:
                group["lr"] = rate.rate_at_step(self.steps_done + 1 - start)
            self._optimizer.zero_grad()
            sums = self.measure(self._draw_batch(rows), dense=dense, train=True)
            self._optimizer.step()
            self._install_weights()
            self.steps_done += 1
            yield sums

    def measure(self, batch: TextBatch, *, dense: bool, train: bool = False) -> dict[int, DistillationSums]:
        """Return layer -> the sums of a batch; with `train` the gradients of their means are added to the indexers."""
        num_queries = int((batch.lengths_B - 1).sum()) if train else None
        copies = {int(layer): indexer for layer, indexer in self._copies.items()}
        return {
            served.layer: distil_indexer(
                served, self._runner.topk, dense=dense, chunk=self._spec.chunk, divisor=num_queries
            )
            for served in run_groups(self._runner, batch, self._pattern, dense=dense, indexers=copies)
        }

    def weights(self) -> dict[int, dict[str, Tensor]]:
        """Return layer -> name -> tensor of the indexers, in float32."""
        return {int(layer): indexer.state_dict() for layer, indexer in self._copies.items()}

    def state(self) -> dict[str, Tensor]:
        """Return what a training goes on from, with `steps_done`."""
        moments = {
            f"{_ADAM}{index}.{key}": value
            for index, values in self._optimizer.state_dict()["state"].items()
            for key, value in values.items()
        }
        return self._copies.state_dict() | moments

    def load_state(self, state: Mapping[str, Tensor], steps_done: int) -> None:
        """Go on after so many steps."""
        self._copies.load_state_dict({name: t for name, t in state.items() if not name.startswith(_ADAM)})
        moments: dict[int, dict[str, Tensor]] = {}
        for name in state:
            if name.startswith(_ADAM):
                index, key = name.removeprefix(_ADAM).split(".")
                moments.setdefault(int(index), {})[key] = state[name]
        groups = self._optimizer.state_dict()["param_groups"]
        self._optimizer.load_state_dict({"state": moments, "param_groups": groups})
        self._install_weights()
        self.steps_done = steps_done

    def _begin_stage(self) -> None:
        self._optimizer = build_adamw(self._copies, ADAMW, lr=0.0)  # every step sets its rate

    @torch.no_grad()
    def _install_weights(self) -> None:
        """Have the model choose by the new weights."""
        for layer, indexer in self._copies.items():
            own = self._runner.attention(int(layer)).indexer
            for param, new in zip(own.parameters(), indexer.parameters(), strict=True):
                param.copy_(new)

    def _draw_batch(self, rows: Sequence[TextRow]) -> TextBatch:
        """Return the rows of the next step, which depend on the seed and the step alone. Each row comes once before any comes again."""
        size = self._spec.batch_size
        positions = range(self.steps_done * size, (self.steps_done + 1) * size)
        orders = {
            epoch: torch.randperm(len(rows), generator=torch.Generator().manual_seed(self._spec.seed + epoch))
            for epoch in {position // len(rows) for position in positions}
        }
        drawn = [rows[int(orders[position // len(rows)][position % len(rows)])] for position in positions]
        return TextBatch.of_rows(drawn, self._runner.device)
