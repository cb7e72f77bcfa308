"""Ranks of a test in processes of their own, without Ray: a test module that is run as a program is one rank."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

ROOT = Path(__file__).parents[2]


def run_ranks(
    module: str, arguments: Sequence[Sequence[str]], timeout_s: float, env: Mapping[str, str] = MappingProxyType({})
) -> list[str]:
    """Run a module once for each rank's arguments, and return what each printed. The ranks meet at the free port `MASTER_PORT`."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    whole_env = {**os.environ, **env, "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "MASTER_PORT": str(port)}
    running = [
        subprocess.Popen(
            [sys.executable, "-m", module, *own],
            env=whole_env, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )
        for own in arguments
    ]  # fmt: skip
    outputs = [process.communicate(timeout=timeout_s)[0] for process in running]
    assert not any(process.returncode for process in running), "\n".join(text[-3000:] for text in outputs)
    return outputs
