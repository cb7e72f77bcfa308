"""Companions: models that learn beside the student, from what the student computes. They change no bit of it.

one forward pass of the student ─▶ logits, while they exist ─▶ `read_logits`
                                └▶ outputs of layers, once the student's backward pass is done ─▶ `add_gradients`
end of the step ─▶ `take_step` of each companion, then the student's
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from opd.records.types import WrittenFile
from opd.train.batch import MicroBatch
from opd.train.gathered_layers import list_decoder_layers

if TYPE_CHECKING:
    from opd.train.zero import ModelOptions


EMBEDDING = -1
"""Stands among the layers' indices for the input embedding."""


class Companion(Protocol):
    """A model on a trainer rank with an optimiser of its own.

    All methods except `read_logits` are called on all ranks at once, so that ranks may add up their gradients in them. The
    tensors that methods get are the student's own memory: a companion reads them and must not write to them.
    """

    @property
    def layers(self) -> Sequence[int]:
        """Indices, from 0, of the decoder layers whose outputs `add_gradients` gets; `EMBEDDING` for that of the input embedding."""
        ...

    def begin_batch(self, batch: MicroBatch) -> None:
        """Prepare for the student's passes over a micro-batch, such as by the choice of tokens to learn from."""
        ...

    def read_logits(self, rows: slice, logits_C_V: Tensor) -> None:
        """Copy what `add_gradients` needs of the student's logits, because the loss overwrites them next.

        `rows` is the place of these C tokens among the N trained tokens of the micro-batch. Called without gradients, once for
        every chunk of tokens; ranks may have different numbers of chunks.
        """
        ...

    def add_gradients(self, batch: MicroBatch, hidden: Mapping[int, Tensor], weight_N: Tensor) -> None:
        """Run the companion's own forward and backward pass for one micro-batch.

        `hidden`: layer -> [B*T, D] its output, detached. `weight_N`: weights of the trained tokens; over all ranks and
        micro-batches of a step they add up to 1.
        """
        ...

    def take_step(self, step: int, share: float) -> dict[str, float]:
        """Step the companion's optimiser with its gradients divided by `share`, the share of the weight on scored tokens, 0..1.

        Returns numbers for the step's record, which are the same on all ranks.
        """
        ...

    def begin_save(self, path: Path) -> None:
        """Copy the companion's state, and begin to write it into `path`, where the student's files go too. The names of its files
        begin with the companion's name."""
        ...

    def saved(self, wait_s: float) -> tuple[WrittenFile, ...] | None:
        """Return the files of the last `begin_save`; None if they are not all written after `wait_s`. Raises: StorageError."""
        ...

    def load(self, path: Path) -> None:
        """Restore what `begin_save` wrote; the number of ranks may have been another one then."""
        ...

    def serving_weights(self) -> dict[str, Tensor]:
        """Return a copy of the weights, by the names that they have where the companion is exported."""
        ...

    def export(self, path: Path) -> None:
        """Let rank 0 write the model into the directory `path`."""
        ...


class CompanionSpec(Protocol):
    """Settings of a companion. They are plain values, because they cross process boundaries."""

    @property
    def name(self) -> str:
        """Name of the companion in records, in checkpoints and of its exported directory."""
        ...

    def start(self, options: ModelOptions, rank: int, student: Any, device: torch.device) -> Companion:
        """Start the companion on a trainer rank that has joined the others. `student` is the rank's module, which the companion
        must not change."""
        ...


class StudentView:
    """Shows companions what one forward pass of the student computes."""

    def __init__(self, companions: Collection[Companion]) -> None:
        self._companions = companions
        self.hidden: dict[int, Tensor] = {}
        """Layer -> [B*T, D] its output, detached."""

    @contextmanager
    def watch_layers(self, lm: Any) -> Iterator[None]:
        """Within, keep the outputs of the layers that companions read. Recomputation in the backward pass comes later, and is not
        seen."""
        layers = list_decoder_layers(lm)
        with ExitStack() as stack:
            for place in {place for companion in self._companions for place in companion.layers}:
                module = lm.get_input_embeddings() if place == EMBEDDING else layers[place]
                stack.enter_context(module.register_forward_hook(partial(self._keep, place)))
            yield

    def _keep(self, place: int, layer: Any, inputs: Any, output: Any) -> None:
        states_B_T_D = output[0] if isinstance(output, tuple) else output
        self.hidden[place] = states_B_T_D.detach().flatten(0, 1)

    def show_logits(self, rows: slice, logits_C_V: Tensor) -> None:
        """Let every companion read the logits of some tokens."""
        for companion in self._companions:
            companion.read_logits(rows, logits_C_V)
