"""The processes of an engine end with their owner, and the owner with the first of them. Played with processes that do nothing."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from opd.rollouts.processes import ENGINE_ENV, engine_env

ROOT = Path(__file__).parents[4]
OWNER = """
import multiprocessing, os, sys, time
from types import SimpleNamespace
from opd.rollouts.worker_extension import WorkerExtension
from opd.rollouts.processes import bind_processes

def part(owner):
    WorkerExtension().opd_bind(owner)
    os.write(1, f"part {os.getpid()}\\n".encode())  # whole, beside what the other one writes
    time.sleep(600)

if __name__ == "__main__":
    context = multiprocessing.get_context("spawn")
    children = [context.Process(target=part, args=(os.getpid(),), daemon=True, name=f"part {i}") for i in range(2)]
    for child in children:
        child.start()
    executor = SimpleNamespace(workers=[SimpleNamespace(proc=c) for c in children], shutting_down=False, is_failed=False)
    llm = SimpleNamespace(
        llm_engine=SimpleNamespace(model_executor=executor), collective_rpc=lambda method, args: os.write(1, f"{method}\\n".encode())
    )
    bind_processes(llm)
    if "stop" in sys.argv:
        executor.shutting_down = True
        for child in children:
            child.kill()
        time.sleep(1)
        sys.exit(7)
    time.sleep(600)
"""


@pytest.fixture
def owner(tmp_path: Path) -> Callable[..., subprocess.Popen[str]]:
    script = tmp_path / "owner.py"
    script.write_text(OWNER)

    def start(*args: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, str(script), *args],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=os.environ | {"PYTHONPATH": str(ROOT)},
        )  # fmt: skip

    return start


def parts(process: subprocess.Popen[str]) -> list[psutil.Process]:
    """The processes of the engine, once both of them are bound to their owner."""
    assert process.stdout is not None
    said = [process.stdout.readline().split() for _ in range(3)]
    assert ["opd_bind"] in said
    return [psutil.Process(int(words[1])) for words in said if words[0] == "part"]


def gone(process: psutil.Process) -> bool:
    try:
        return process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def ends(processes: list[psutil.Process]) -> bool:
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline and not all(map(gone, processes)):
        time.sleep(0.05)
    return all(map(gone, processes))


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="elsewhere there is only vLLM's own way")
def test_parts_end_with_an_owner_that_is_killed(owner: Callable[..., subprocess.Popen[str]]) -> None:
    """Even parts that are stopped, and would not notice a pipe that closes."""
    process = owner()
    found = parts(process)
    os.kill(found[0].pid, signal.SIGSTOP)
    process.kill()
    process.wait()
    assert ends(found)


def test_the_owner_ends_with_a_part_that_is_killed_and_so_do_the_others(
    owner: Callable[..., subprocess.Popen[str]],
) -> None:
    process = owner()
    first, second = parts(process)
    first.kill()
    assert process.wait(timeout=20) == 1
    assert process.stderr is not None
    assert "a process of the engine, ended with status -9" in process.stderr.read()
    if sys.platform.startswith("linux"):
        assert ends([second])


def test_an_engine_that_is_stopped_on_purpose_leaves_its_owner_alone(
    owner: Callable[..., subprocess.Popen[str]],
) -> None:
    assert owner("stop").wait(timeout=20) == 7


def test_processes_of_an_engine_meet_on_this_machine_alone() -> None:
    assert engine_env(1) == ENGINE_ENV
    assert engine_env(2).items() > ENGINE_ENV.items()
    assert engine_env(2)["VLLM_WORKER_MULTIPROC_METHOD"] == "spawn"
    if sys.platform.startswith("linux"):
        assert engine_env(2)["GLOO_SOCKET_IFNAME"] == engine_env(2)["NCCL_SOCKET_IFNAME"] == "lo"
