"""A server that a test starts leaves no process and no shared memory, also if it does not end when it is asked."""

from __future__ import annotations

import os
import sys
import tempfile
import time
from pathlib import Path

import psutil
import pytest

from tests.servers import SHARED_MEMORY, serving

SERVER = """
import mmap, multiprocessing, signal, sys, time
from multiprocessing.shared_memory import SharedMemory

def engine(sender):
    segment = SharedMemory(create=True, size=1000)
    sender.send(segment.name)
    time.sleep(600)

if sys.argv[1] == "deaf":
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # and the engine that is forked from it
with open(sys.argv[2], "r+b") as file:
    mapped = mmap.mmap(file.fileno(), 0)
receiver, sender = multiprocessing.Pipe()
child = multiprocessing.get_context("fork").Process(target=engine, args=(sender,), daemon=True)
child.start()
print(receiver.recv(), child.pid, flush=True)
child.join()
"""


@pytest.mark.parametrize("kind", ["willing", "deaf"])
def test_a_server_ends_with_its_engine_and_its_segments(kind: str, tmp_path: Path) -> None:
    script, log = tmp_path / "server.py", tmp_path / "log"
    script.write_text(SERVER)
    with tempfile.NamedTemporaryFile(dir=SHARED_MEMORY) as another:
        another.truncate(4096)
        command = [sys.executable, str(script), kind, another.name]
        with serving(command, os.environ, log, grace_s=2.0) as server:
            deadline = time.monotonic() + 60
            while len(words := log.read_text().split()) < 2:
                assert server.poll() is None and time.monotonic() < deadline, log.read_text()
                time.sleep(0.05)
            segment, engine = SHARED_MEMORY / words[0], int(words[1])
            assert segment.exists() and psutil.pid_exists(engine)
        assert server.returncode is not None
        assert not psutil.pid_exists(engine) or psutil.Process(engine).status() == psutil.STATUS_ZOMBIE
        assert not segment.exists()
        assert Path(another.name).exists(), "it was there before, whoever maps it"
