"""The machine that a proposal is for."""

from __future__ import annotations

from dataclasses import dataclass

from opd.cluster.environment import count_cores
from opd.machine.processor import has_bf16
from pipelines.inputs.gpu_memory import gpu_sizes
from pipelines.inputs.machine_memory import machine_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineFacts:
    """Hardware of this machine."""

    cores: int
    memory: int
    """Bytes."""
    gpus: tuple[int, ...] = ()
    """Bytes of each GPU."""
    bf16: bool = False
    """The cores multiply in bfloat16."""

    def __str__(self) -> str:
        gpus = (
            f"{len(self.gpus)} GPU{'s' if len(self.gpus) > 1 else ''} of {min(self.gpus) >> 30} GiB"
            if self.gpus
            else "no GPU"
        )
        return f"{self.cores} core{'s' if self.cores > 1 else ''}, {self.memory >> 30} GiB of memory, {gpus}"


def read_machine() -> MachineFacts:
    """The machine that this process runs on."""
    return MachineFacts(cores=count_cores(), memory=machine_bytes(), gpus=tuple(gpu_sizes()), bf16=has_bf16())
