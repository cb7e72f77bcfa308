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


def list_gpus() -> list[GPU]:
    """Every NVIDIA GPU that this process may use, from `nvidia-smi`; empty if there is no such tool."""
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


def _visible_gpus(gpus: Sequence[GPU], device_names: Sequence[str]) -> list[GPU]:
    """The GPUs that are named by their numbers, or by the beginning of their UUIDs; like CUDA, up to the first name that none
    has."""
    visible: list[GPU] = []
    for name in map(str.strip, device_names):
        matches = [gpu for number, gpu in enumerate(gpus) if name == str(number) or (name and gpu.uuid.startswith(name))]
        if not matches:
            break
        visible.append(matches[0])
    return visible
