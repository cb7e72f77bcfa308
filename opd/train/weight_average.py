"""A moving average of the weights that training changes, as a teacher: after each optimiser step t <- d t + (1 - d) s.

Every rank averages its own shards of the float32 weights s, so nothing is gathered for it. To score, the shards in the student's
parameters give way to the average's for a while; whatever gathers weights then gathers those of the average.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor


def name_average(decay: float) -> str:
    """Return the name of the average with this decay, in checkpoints and as an output head."""
    return f"average-{decay!r}"


class WeightAverage:
    """The average on one rank. Every method is called on all ranks at once."""

    def __init__(self, decay: float, parameters: Sequence[tuple[str, Any]], optimizer: Any) -> None:
        """Begin with the weights as they are. `decay`: d, in 0..1; `optimizer`: DeepSpeed's, which holds the float32 weights."""
        from deepspeed.utils import safe_get_local_fp32_param

        self._decay = decay
        self._parameters = parameters
        self._optimizer = optimizer
        self._read = safe_get_local_fp32_param
        self.shards: dict[str, Tensor] = {name: self._read(param).clone() for name, param in parameters}
        """Parameter's name -> [numbers of the shard, with ZeRO-3's padding] of the average, float32."""

    def add_student(self) -> None:
        """Add the student's weights, after its optimiser step."""
        for name, param in self._parameters:
            self.shards[name].mul_(self._decay).add_(self._read(param), alpha=1 - self._decay)

    def load_shards(self, shards: Mapping[str, Tensor] | None) -> None:
        """Take these shards in place of the own ones; None: begin anew with the weights as they are."""
        for name, param in self._parameters:
            self.shards[name].copy_(self._read(param) if shards is None else shards[name])

    @contextmanager
    def in_place_of_student(self) -> Iterator[None]:
        """Within, the student computes with the average; afterwards it has its own weights again, bit for bit."""
        own = {name: param.ds_tensor.data.clone() for name, param in self._parameters}
        self._write_shards(self.shards)
        try:
            yield
        finally:
            self._write_shards(own)

    def _write_shards(self, shards: Mapping[str, Tensor]) -> None:
        # DeepSpeed keeps small parameters whole on every rank. The prologue cuts them, the epilogue gathers them again.
        self._optimizer.checkpoint_event_prologue()
        for name, param in self._parameters:
            param.ds_tensor.data.copy_(shards[name])
        # Copies of the weights that the ranks of one machine share are as old as the weights before.
        self._optimizer.invalidate_secondary_tensor()
        self._optimizer.checkpoint_event_epilogue()
