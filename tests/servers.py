"""A server for the length of a test, ended with all that it leaves: its processes and its shared memory."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import psutil

SHARED_MEMORY = Path("/dev/shm")
GRACE_S = 30.0
"""For a server to end by itself when it is asked."""


@contextlib.contextmanager
def serving(
    command: Sequence[str], env: Mapping[str, str], log: Path, grace_s: float = GRACE_S
) -> Iterator[subprocess.Popen[bytes]]:
    """Starts it in a session of its own; on exit asks it to end, kills what has not, and removes its shared memory.

    A killed process cannot free what it made in /dev/shm, and a `vllm serve` has made hundreds of MB there.
    """
    before = set(SHARED_MEMORY.iterdir())
    with log.open("wb") as file:
        server = subprocess.Popen(command, env=env, stdout=file, stderr=file, start_new_session=True)
    try:
        yield server
    finally:
        for path in sorted(_end(server, grace_s) - before):
            path.unlink(missing_ok=True)


def _end(server: subprocess.Popen[bytes], grace_s: float) -> set[Path]:
    """Returns the shared memory that its processes had."""
    segments = _segments(server.pid)
    server.send_signal(signal.SIGINT)
    deadline = time.monotonic() + grace_s
    while _members(server.pid) and time.monotonic() < deadline:  # its engine too, and what frees segments after it
        server.poll()
        segments |= _segments(server.pid)
        time.sleep(0.1)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(server.pid, signal.SIGKILL)
    server.wait(timeout=60)
    gone = time.monotonic() + 60
    while _members(server.pid):
        assert time.monotonic() < gone, "killed processes that do not go"
        time.sleep(0.05)
    return segments


def _members(session: int) -> list[int]:
    """Its processes that live."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, ProcessLookupError):
            if os.getsid(process.pid) == session and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process.pid)
    return found


def _segments(session: int) -> set[Path]:
    """Return what its processes have mapped of /dev/shm."""
    found: set[Path] = set()
    for pid in _members(session):
        with contextlib.suppress(OSError):
            maps = Path(f"/proc/{pid}/maps").read_text()
            found |= {Path(name) for name in re.findall(rf"({SHARED_MEMORY}/\S+)$", maps, flags=re.MULTILINE)}
    return found
