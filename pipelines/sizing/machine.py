"""The hardware that a merge has to fit: memory of this machine or container, its cores and its GPUs. No GPU is touched."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from opd.cluster.environment import count_cores
from opd.machine.processor import has_bf16

CGROUP_LIMITS = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineFacts:
    """Hardware of a machine, or of several that are counted as one."""

    cores: int
    memory: int
    """Bytes of the memory that processes may have, without that of GPUs."""
    gpus: tuple[int, ...] = ()
    """Bytes of each GPU."""
    bf16: bool = False
    """True if the cores have instructions for products in bfloat16."""

    def __str__(self) -> str:
        several = "s" if len(self.gpus) > 1 else ""
        gpus = f"{len(self.gpus)} GPU{several} of {min(self.gpus) >> 30} GiB" if self.gpus else "no GPU"
        return f"{self.cores} core{'s' if self.cores > 1 else ''}, {self.memory >> 30} GiB of memory, {gpus}"


@dataclass(frozen=True, slots=True, kw_only=True)
class GPU:
    """A GPU that this process may use."""

    uuid: str
    nbytes: int
    """Its memory."""
    name: str
    """Its model, such as `NVIDIA H100 80GB HBM3`."""


def read_machine() -> MachineFacts:
    """Return the hardware of the machine that this process runs on."""
    return MachineFacts(cores=count_cores(), memory=machine_bytes(), gpus=tuple(gpu_sizes()), bf16=has_bf16())


def machine_bytes() -> int:
    """Return the memory that the processes of this machine or container may have."""
    limits = [int(file.read_text()) for file in CGROUP_LIMITS if file.is_file() and file.read_text().strip().isdigit()]
    return min([psutil.virtual_memory().total, *limits])


def free_bytes() -> int:
    """Return the part of `machine_bytes` that is free now: at most a container's limit, even if the machine has more."""
    return min(psutil.virtual_memory().available, machine_bytes())


def gpu_sizes() -> list[int]:
    """Return the bytes of every GPU that this process may use."""
    return [gpu.nbytes for gpu in list_gpus()]


def list_gpus() -> list[GPU]:
    """Return every NVIDIA GPU that this process may use, from `nvidia-smi`; empty if there is no such tool."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return []
    command = [tool, "--query-gpu=uuid,memory.total,name", "--format=csv,noheader,nounits"]
    try:
        process = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    except subprocess.TimeoutExpired:
        return []
    rows = [line.split(", ", 2) for line in process.stdout.splitlines()] if process.returncode == 0 else []
    gpus = [
        GPU(uuid=row[0], nbytes=int(row[1]) << 20, name=row[2]) for row in rows if len(row) == 3 and row[1].isdigit()
    ]
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return gpus if visible is None else _visible_gpus(gpus, visible.split(","))


def _visible_gpus(gpus: Sequence[GPU], names: Sequence[str]) -> list[GPU]:
    """Return the GPUs that are named by their numbers, or by the beginning of their UUIDs.

    Like CUDA, this looks no further than the first name that no GPU has.
    """
    visible: list[GPU] = []
    for name in map(str.strip, names):
        hits = [gpu for number, gpu in enumerate(gpus) if name == str(number) or (name and gpu.uuid.startswith(name))]
        if not hits:
            break
        visible.append(hits[0])
    return visible
