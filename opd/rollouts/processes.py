"""The processes of an engine that has several: what they are started with, and that none outlives the others.

vLLM starts them from the process that owns the engine, which schedules and holds no weights. They sum up their parts through
shared memory or NCCL, on one machine.
"""

from __future__ import annotations

import os
import re
import sys
import threading
from collections.abc import Iterator, MutableMapping
from contextlib import contextmanager
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

from opd.errors import RunError
from opd.machine.address import GLOO_DEVICE, LOOPBACK_DEVICE, NCCL_DEVICE

ENGINE_ENV = {
    # Run the engine inside the worker: faster on a small machine, and no engine process can outlive its owner.
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    # Otherwise vLLM chooses its own number of threads and pins them to cores, to the same ones in every engine.
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
}
"""Environment of the process that owns an engine."""
LOG_LINES = 30
SHARED = re.compile(r"/dev/shm/(psm_.*|vllm_dist_.*-cpushm_\d+)")
"""Shared memory by the names that Python gives it, and that vLLM's sums over processes have: on x86 only its build for AVX-512 has
such sums, so other processors never show the second kind."""


def drop_service_port(environ: MutableMapping[str, str]) -> None:
    """Take VLLM_PORT away where it is an address such as tcp://10.0.0.7:8000.

    Kubernetes sets that in every pod beside a service named `vllm`; vLLM wants a number there, and would not start.
    """
    if "://" in environ.get("VLLM_PORT", ""):
        del environ["VLLM_PORT"]


def engine_env(size: int) -> dict[str, str]:
    """Return the environment variables of the owner of an engine of so many processes, which inherit it."""
    if size == 1:
        return ENGINE_ENV
    own = {"VLLM_WORKER_MULTIPROC_METHOD": "spawn"}  # a fork would copy the owner's threads' locks without the threads
    if sys.platform.startswith("linux"):  # they find each other by sockets, on this machine alone
        own |= {GLOO_DEVICE: LOOPBACK_DEVICE, NCCL_DEVICE: LOOPBACK_DEVICE}
    return ENGINE_ENV | own


@contextmanager
def explain_failed_start(size: int) -> Iterator[None]:
    """Explain a failed start of an engine of so many processes within this context. Raises: RunError with what they wrote if
    they do not start: vLLM's own error says no more than that it is somewhere else."""
    try:
        yield
    except Exception as error:  # vLLM raises no narrower one here
        log = Path("/proc/self/fd/2")  # a worker's file, which its processes write to as well
        if size == 1 or not log.is_file():
            raise
        last = log.read_text(encoding="utf-8", errors="replace").splitlines()[-LOG_LINES:]
        raise RunError("\n".join([f"the {size} processes of the engine did not start: {error}", *last])) from None


def bind_processes(llm: Any) -> None:
    """Let an engine's processes end with this one, and this one with the first of them that dies.

    A worker is its process to whoever watches it: with a part of its engine gone it must die too, and is then started again.
    vLLM would raise an error here, now or after minutes, from an engine that can never answer again.
    """
    executor = llm.llm_engine.model_executor
    children = [handle.proc for handle in getattr(executor, "workers", ())]
    if not children:
        return
    # By "parent" Linux means the thread that started them.
    owner = os.getpid() if threading.current_thread() is threading.main_thread() else None
    llm.collective_rpc("opd_bind", args=(owner,))
    unlink_shared_memory()
    threading.Thread(target=_exit_with_child, args=(executor, children), daemon=True, name="engine's processes").start()


def unlink_shared_memory() -> None:
    """Unlink the shared memory that this process has mapped: it then goes with the last process that has it.

    vLLM unlinks it when an engine is stopped, and leaves it in the machine's memory when one is killed. All processes have
    mapped it by now.
    """
    maps = Path("/proc/self/maps")
    for line in maps.read_text().splitlines() if maps.exists() else ():
        name = line.split()[-1]
        if SHARED.fullmatch(name):
            Path(name).unlink(missing_ok=True)


def _exit_with_child(executor: Any, children: list[Any]) -> None:
    ended = wait([child.sentinel for child in children])
    if getattr(executor, "shutting_down", False) and not executor.is_failed:
        return  # the engine was stopped on purpose
    dead = next(child for child in children if child.sentinel == ended[0])
    dead.join(1.0)  # its status comes a moment after its end
    print(f"{dead.name}, a process of the engine, ended with status {dead.exitcode}", file=sys.stderr, flush=True)
    # At once, because the main thread may wait for the dead process for ever.
    os._exit(1)
