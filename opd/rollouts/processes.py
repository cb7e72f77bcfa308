"""The processes of an engine that has several: their environment, and how they end together.

vLLM starts them from the process that owns the engine, which schedules requests and holds no weights. They sum up their parts of a result
through shared memory or NCCL, on one machine.
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
"""Last lines of the processes' log that the error of a failed start shows."""
SHARED = re.compile(r"/dev/shm/(psm_.*|vllm_dist_.*-cpushm_\d+)")
"""Paths of shared memory: with the names that Python gives, and with those of vLLM's sums over processes. On x86 only its build for AVX-512
has such sums, so the second kind is never seen on other x86 processors."""


def drop_service_port(environ: MutableMapping[str, str]) -> None:
    """Delete VLLM_PORT from the environment if it is an address such as tcp://10.0.0.7:8000.

    Kubernetes sets it to that in every pod of a namespace with a service named `vllm`. vLLM expects a number, and would not start.
    """
    if "://" in environ.get("VLLM_PORT", ""):
        del environ["VLLM_PORT"]


def engine_env(size: int) -> dict[str, str]:
    """Return the environment variables for the owner of an engine of `size` processes, which inherit them."""
    if size == 1:
        return ENGINE_ENV
    env = {"VLLM_WORKER_MULTIPROC_METHOD": "spawn"}  # a fork would copy the owner's threads' locks without the threads
    if sys.platform.startswith("linux"):  # they find each other by sockets, on this machine alone
        env |= {GLOO_DEVICE: LOOPBACK_DEVICE, NCCL_DEVICE: LOOPBACK_DEVICE}
    return ENGINE_ENV | env


@contextmanager
def explain_failed_start(size: int) -> Iterator[None]:
    """Explain why an engine of `size` processes does not start within this context. Raises: RunError with the last lines that the processes
    wrote; vLLM's own error only says to look elsewhere."""
    try:
        yield
    except Exception as error:  # vLLM raises no narrower class here
        log = Path("/proc/self/fd/2")  # a worker's standard error is a file, to which its processes write as well
        if size == 1 or not log.is_file():
            raise
        last = log.read_text(encoding="utf-8", errors="replace").splitlines()[-LOG_LINES:]
        raise RunError("\n".join([f"the {size} processes of the engine did not start: {error}", *last])) from None


def bind_processes(llm: Any) -> None:
    """Have an engine's processes end when this one ends, and this one as soon as one of them dies.

    Whoever watches a worker sees this process alone. So it must die with any part of its engine; then the worker is restarted. vLLM itself
    would raise an error here, at once or after minutes, and leave an engine that can never answer again.
    """
    executor = llm.llm_engine.model_executor
    children = [handle.proc for handle in getattr(executor, "workers", ())]
    if not children:
        return
    # To Linux the "parent" is the thread that started a process, not its process. So this works only from the main thread.
    owner = os.getpid() if threading.current_thread() is threading.main_thread() else None
    llm.collective_rpc("opd_bind", args=(owner,))
    unlink_shared_memory()
    threading.Thread(target=_exit_with_child, args=(executor, children), daemon=True, name="engine's processes").start()


def unlink_shared_memory() -> None:
    """Unlink the shared memory that this process has mapped: the system then frees it when the last process with it ends.

    vLLM unlinks it only when an engine is stopped; after a kill it would stay in the machine's memory. All processes of the engine have
    mapped it by now, so they do not need its name.
    """
    maps = Path("/proc/self/maps")
    for line in maps.read_text().splitlines() if maps.exists() else ():
        name = line.split()[-1]
        if SHARED.fullmatch(name):
            Path(name).unlink(missing_ok=True)


def _exit_with_child(executor: Any, children: list[Any]) -> None:
    """Wait until a child ends, and end this process then, unless the engine was stopped on purpose."""
    ended = wait([child.sentinel for child in children])
    if getattr(executor, "shutting_down", False) and not executor.is_failed:
        return  # the engine was stopped on purpose
    dead = next(child for child in children if child.sentinel == ended[0])
    dead.join(1.0)  # its exit status is there a moment after its end
    print(f"{dead.name}, a process of the engine, ended with status {dead.exitcode}", file=sys.stderr, flush=True)
    # `os._exit` ends the process at once: the main thread may be waiting for the dead process, for ever.
    os._exit(1)
