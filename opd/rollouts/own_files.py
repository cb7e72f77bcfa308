"""vLLM's files in the temporary directory: where the processes of an engine meet, and the sockets between them.

Every engine has a `vllm_dist_...`, also one of a single process; one of several has sockets with random names as well. vLLM
removes them when an engine ends by itself. A worker is mostly killed, and they stay: here they get a folder with the worker's
mark, which goes when the worker does, or is swept up like all that a killed process leaves (`opd.machine.leftovers`).
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from types import SimpleNamespace

from opd.machine import leftovers
from opd.machine.leftovers import SHARED_MEMORY

SOCKETS = "VLLM_RPC_BASE_PATH"
"""The variable that vLLM reads, with the directory of its sockets."""


@contextmanager
def own_files() -> Iterator[None]:
    """Have engines that start in this context put their files into this process's own folder."""
    from vllm.utils import network_utils

    folder, old_sockets, vllm_tempfile = own_folder(), os.environ.get(SOCKETS), network_utils.tempfile
    os.environ[SOCKETS] = folder
    # There is no setting for the other file. Python's own temporary directory stays: torch has its compiled code there.
    network_utils.tempfile = SimpleNamespace(gettempdir=lambda: folder)
    try:
        yield
    finally:
        network_utils.tempfile = vllm_tempfile
        if old_sockets is None:
            del os.environ[SOCKETS]
        else:
            os.environ[SOCKETS] = old_sockets


def own_folder() -> str:
    """Return this process's folder, which no other user can enter; it is made when it is first asked for."""
    return _own_folder().name


@cache
def _own_folder() -> tempfile.TemporaryDirectory[str]:
    """Return this process's folder, which lives as long as it does."""
    leftovers.delete_directories()  # of workers that were killed on a node where no driver comes by
    # A socket's path has 107 characters at most, and a temporary directory's may be long.
    return tempfile.TemporaryDirectory(
        prefix=leftovers.directory_prefix(),
        dir=SHARED_MEMORY if SHARED_MEMORY.is_dir() else None,
        ignore_cleanup_errors=True,
    )
