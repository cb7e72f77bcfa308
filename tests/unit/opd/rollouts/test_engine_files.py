"""vLLM's files lie in a folder of the worker, and do not outlive it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

from vllm import envs
from vllm.utils import network_utils

from opd.machine import orphans
from opd.rollouts.engine_files import own_files

ROOT = Path(__file__).parents[4]
WORKER = """
import time
from opd.rollouts.engine_files import _own_folder
print(_own_folder().name, flush=True)
time.sleep(600 if {stays} else 0)
"""


def worker(*, stays: bool) -> tuple[subprocess.Popen[str], Path]:
    """A process that has made its folder, and the folder."""
    process = subprocess.Popen(
        [sys.executable, "-c", WORKER.format(stays=stays)],
        stdout=subprocess.PIPE, text=True, env=os.environ | {"PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert process.stdout is not None
    return process, Path(process.stdout.readline().strip())


def test_an_engine_that_starts_meets_in_the_folder_of_its_process() -> None:
    before = tempfile.gettempdir(), envs.VLLM_RPC_BASE_PATH
    with own_files():
        meeting = Path(network_utils.get_file_store_init_method().removeprefix("file://"))
        socket = Path(network_utils.get_open_zmq_ipc_path().removeprefix("ipc://"))
    assert meeting.name.startswith("vllm_dist_") and meeting.parent == socket.parent
    assert meeting.parent.name.startswith(orphans.directory_prefix()) and meeting.parent.is_dir()
    assert len(str(socket)) < 108, "the longest path that a socket may have"
    after = Path(network_utils.get_file_store_init_method().removeprefix("file://"))
    assert str(after.parent) == tempfile.gettempdir() == before[0], "what others in this process put there stays there"
    assert before[1] == envs.VLLM_RPC_BASE_PATH


def test_the_folder_goes_with_a_worker_that_ends() -> None:
    process, folder = worker(stays=False)
    assert process.wait(timeout=60) == 0
    assert folder.name.startswith("opd-run-") and not folder.exists()


def test_the_folder_of_a_worker_that_was_killed_is_swept_up_and_no_other() -> None:
    (killed, gone), (lives, kept) = worker(stays=True), worker(stays=True)
    try:
        killed.send_signal(signal.SIGKILL)
        killed.wait(timeout=60)
        (gone / "vllm_dist_1").write_text("")
        orphans.end_own_processes()
        assert not gone.exists() and kept.is_dir()
        lives.kill()
        lives.wait(timeout=60)
        third, _ = worker(stays=False)  # of another run, on a node where no driver comes by
        assert third.wait(timeout=60) == 0 and not kept.exists()
    finally:
        for process in (killed, lives):
            process.kill()
            process.wait(timeout=60)
