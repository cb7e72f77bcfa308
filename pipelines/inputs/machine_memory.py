"""Memory of this machine."""

from __future__ import annotations

from pathlib import Path

import psutil

CGROUP_LIMITS = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))


def machine_bytes() -> int:
    """Memory that the processes of this machine or container may have."""
    limits = [int(file.read_text()) for file in CGROUP_LIMITS if file.is_file() and file.read_text().strip().isdigit()]
    return min([psutil.virtual_memory().total, *limits])
