"""Memory that goes back to the system."""

from __future__ import annotations

import ctypes
import platform

import psutil
import pytest

from opd.machine.devices import trim_memory

MIB = 1 << 20


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another malloc")
def test_what_malloc_keeps_in_holes_goes_back() -> None:
    """Small blocks are freed while one above them stays, as activations are below what a step leaves behind."""
    libc, own = ctypes.CDLL(None), psutil.Process()
    libc.malloc.restype, libc.free.argtypes = ctypes.c_void_p, (ctypes.c_void_p,)
    blocks = [libc.malloc(100_000) for _ in range(1000)]
    last = libc.malloc(100_000)
    for block in [*blocks, last]:
        ctypes.memset(block, 1, 100_000)
    for block in blocks:
        libc.free(block)
    kept = own.memory_info().rss
    trim_memory()
    assert kept - own.memory_info().rss > 80 * MIB
    libc.free(last)
