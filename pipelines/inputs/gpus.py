"""The GPUs of this machine, as NVIDIA's driver tells of them. No GPU is touched."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class GPU:
    """A GPU that this process may use."""

    uuid: str
    nbytes: int
    """Its memory."""
    name: str
    """Its model, such as `NVIDIA H100 80GB HBM3`."""


def gpus_here() -> list[GPU]:
    """Every NVIDIA GPU that this process may use, from `nvidia-smi`; empty if there is no such tool."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return []
    command = [tool, "--query-gpu=uuid,memory.total,name", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    except subprocess.TimeoutExpired:
        return []
    rows = [line.split(", ", 2) for line in done.stdout.splitlines()] if done.returncode == 0 else []
    found = [
        GPU(uuid=row[0], nbytes=int(row[1]) << 20, name=row[2]) for row in rows if len(row) == 3 and row[1].isdigit()
    ]
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return found if visible is None else _visible_gpus(found, visible.split(","))


def _visible_gpus(gpus: Sequence[GPU], named: Sequence[str]) -> list[GPU]:
    """The GPUs that are named by their numbers, or by the beginning of their UUIDs; like CUDA, up to the first name that none
    has."""
    found: list[GPU] = []
    for name in map(str.strip, named):
        mine = [gpu for number, gpu in enumerate(gpus) if name == str(number) or (name and gpu.uuid.startswith(name))]
        if not mine:
            break
        found.append(mine[0])
    return found
