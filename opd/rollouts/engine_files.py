"""Keep vLLM's temporary files in a folder of the worker: the file by which the processes of an engine meet, and the sockets between them.

Every engine has a file `vllm_dist_...`, even one of a single process; an engine of several processes also has sockets with random names.
vLLM removes these when an engine ends by itself. But a worker is mostly killed, and then they stay. So they get a folder with the worker's
mark, which is deleted when the worker ends, or swept up like everything that a killed process leaves (`opd.machine.orphans`).
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from types import SimpleNamespace

from opd.machine import orphans
from opd.machine.orphans import SHARED_MEMORY

SOCKETS = "VLLM_RPC_BASE_PATH"
"""The environment variable from which vLLM reads the directory of its sockets."""


@contextmanager
def own_files() -> Iterator[None]:
    """Have engines that start in this context put their files into this process's own folder."""
    from vllm.utils import network_utils

    folder, old_sockets, vllm_tempfile = own_folder(), os.environ.get(SOCKETS), network_utils.tempfile
    os.environ[SOCKETS] = folder
    # vLLM has no setting for the place of `vllm_dist_...`, so its `tempfile` is replaced in that module. Python's own temporary directory
    # is not changed, because torch keeps its compiled code there.
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
    """Return the path of this process's folder, which no other user can enter. It is made by the first call."""
    return _own_folder().name


@cache
def _own_folder() -> tempfile.TemporaryDirectory[str]:
    """Make this process's folder, which lives as long as the process."""
    orphans.delete_directories()  # of workers that were killed on a node where no driver comes by
    # A socket's path has 107 characters at most, and a temporary directory's may be long.
    return tempfile.TemporaryDirectory(
        prefix=orphans.directory_prefix(),
        dir=SHARED_MEMORY if SHARED_MEMORY.is_dir() else None,
        ignore_cleanup_errors=True,
    )
