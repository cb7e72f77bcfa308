"""Companions: models beside the student that learn from what it computes, and change no bit of it.

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
from opd.train.gathered import list_decoder_layers

if TYPE_CHECKING:
    from opd.train.zero import ModelOptions


class Companion(Protocol):
    """A model on a trainer rank with an optimiser of its own. All methods but `read_logits` are called on all ranks at once, so
    ranks may add up their gradients in them. The tensors are the student's own memory: they are read, and not written to."""

    layers: Sequence[int]
    """Decoder layers, from 0, whose outputs it reads."""

    def read_logits(self, rows: slice, logits_C_V: Tensor) -> None:
        """Copy what `add_gradients` will need of the student's logits of these trained tokens of the micro-batch: the loss
        overwrites them next. Called without gradients, once for every chunk, of which ranks have different numbers."""
        ...

    def add_gradients(self, batch: MicroBatch, hidden: Mapping[int, Tensor], weight_N: Tensor) -> None:
        """Run its own forward and backward pass. `hidden`: layer -> [B*T, D], detached. The weights of all ranks make a mean."""
        ...

    def take_step(self, step: int, share: float) -> dict[str, float]:
        """Step its optimiser with the gradients divided by `share`, the part of the weight that was scored. Returns numbers for
        the step's record, the same on all ranks."""
        ...

    def begin_save(self, path: Path) -> None:
        """Copy its state; it is written meanwhile, into files whose names begin with the companion's, in the directory of the
        student's."""
        ...

    def saved(self, wait_s: float) -> tuple[WrittenFile, ...] | None:
        """Return the files of the last `begin_save`; None if they are not all written after `wait_s`. Raises: StorageError."""
        ...

    def load(self, path: Path) -> None:
        """Restore what `begin_save` wrote, by whatever number of ranks."""
        ...

    def export(self, path: Path) -> None:
        """Let rank 0 write the model into a directory."""
        ...


class CompanionSpec(Protocol):
    """Settings of a companion; plain values, so they cross process boundaries."""

    name: str

    def start(self, options: ModelOptions, rank: int, student: Any, device: torch.device) -> Companion:
        """Start it on a rank of a trainer that has joined the others; `student` is its module, which stays as it is."""
        ...


class StudentView:
    """What companions see of one forward pass of the student."""

    def __init__(self, companions: Collection[Companion]) -> None:
        self._companions = companions
        self.hidden: dict[int, Tensor] = {}
        """Layer -> [B*T, D] its output, detached."""

    @contextmanager
    def watch_layers(self, lm: Any) -> Iterator[None]:
        """Keep the layers' outputs within; a pass that recomputes them later is not seen."""
        layers = list_decoder_layers(lm)
        with ExitStack() as stack:
            for place in {place for companion in self._companions for place in companion.layers}:
                stack.enter_context(layers[place].register_forward_hook(partial(self._keep, place)))
            yield

    def _keep(self, place: int, layer: Any, inputs: Any, output: Any) -> None:
        states_B_T_D = output[0] if isinstance(output, tuple) else output
        self.hidden[place] = states_B_T_D.detach().flatten(0, 1)

    def show_logits(self, rows: slice, logits_C_V: Tensor) -> None:
        """Let every companion read the logits of some tokens."""
        for companion in self._companions:
            companion.read_logits(rows, logits_C_V)
