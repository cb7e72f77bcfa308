"""Processor, memory, disks, loopback and GPUs of this machine or container."""

from __future__ import annotations

import os
import platform
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

from opd.cluster.environment import count_cores
from opd.machine.compiler import find_compiler
from opd.machine.orphans import SHARED_MEMORY
from opd.machine.packages import installed_version
from pipelines.doctor.finding import DoctorFinding, failed_finding, ok_finding, warning_finding
from pipelines.sizing.machine import free_bytes, machine_bytes

GIB = 1 << 30
LEAST_MEMORY, GOOD_MEMORY = 4 * GIB, 8 * GIB
"""Limits in bytes. The quickstart needs a little more than the first, a model of a hundred million parameters the second."""
LEAST_DISK, GOOD_DISK = GIB, 10 * GIB
GOOD_SHARED_MEMORY = GIB
LOOPBACK_TIMEOUT_S = 5.0
SMI_TIMEOUT_S = 20.0


def machine_findings() -> Iterator[DoctorFinding]:
    """Yield the findings about this machine. The checks leave nothing behind."""
    yield _check_processor()
    yield _check_load()
    yield _check_compiler()
    yield _check_memory()
    yield _check_shared_memory()
    yield _check_disk("disk", Path.cwd(), "runs/ lies here")
    yield _check_disk("temporary directory", Path(tempfile.gettempdir()), "Ray's and vLLM's files lie here")
    yield _check_loopback()
    yield _check_gpus()


def _format_gib(nbytes: float) -> str:
    return f"{nbytes / GIB:.1f} GiB"


def _format_cores(number: int) -> str:
    return f"{number} core{'s' if number > 1 else ''}"


def _check_processor() -> DoctorFinding:
    cores, kind = count_cores(), platform.machine()
    processor = f"{_format_cores(cores)}, {platform.system()} on {kind}"
    if platform.system() != "Linux" or kind not in ("x86_64", "aarch64"):
        return failed_finding("processor", processor, "merge on Linux: vLLM and Ray are tried nowhere else")
    if cores < 2:
        return warning_finding(
            "processor", processor, "two cores or more: the roles of a merge take turns on one, and Ray wants its own"
        )
    return ok_finding("processor", processor)


def _check_load() -> DoctorFinding:
    load, cores = os.getloadavg()[0], count_cores()
    load_text = f"{load:.1f} processes at work on {_format_cores(cores)}"
    if load > cores:
        return warning_finding(
            "load", load_text, "wait for the other programs, or stop them: shared cores make steps several times slower"
        )
    return ok_finding("load", load_text)


def _check_compiler() -> DoctorFinding:
    compiler = find_compiler()
    if compiler is None:
        return warning_finding(
            "compiler",
            "no c++ or g++",
            "install g++ if you want objective.compile or trainer.compile; without it both run eagerly",
        )
    return ok_finding("compiler", compiler)


def _check_memory() -> DoctorFinding:
    limit, free = machine_bytes(), free_bytes()
    memory_text = f"{_format_gib(free)} free of {_format_gib(limit)}"
    if limit < LEAST_MEMORY:
        return failed_finding("memory", memory_text, f"a machine or container with {_format_gib(GOOD_MEMORY)}")
    if free < LEAST_MEMORY:
        return warning_finding(
            "memory", memory_text, "stop other programs; `opd check PIPELINE` has the sum of what a merge will need"
        )
    if limit < GOOD_MEMORY:
        return warning_finding(
            "memory", memory_text, "small models only; `opd check PIPELINE` has the sum of what a merge will need"
        )
    return ok_finding("memory", memory_text)


def _check_shared_memory() -> DoctorFinding:
    if not SHARED_MEMORY.is_dir():
        return warning_finding(
            str(SHARED_MEMORY), "not there", "mount a tmpfs there: Ray's objects and new weights go to disk without it"
        )
    usage = shutil.disk_usage(SHARED_MEMORY)
    space = f"{_format_gib(usage.free)} free of {_format_gib(usage.total)}"
    if usage.free < GOOD_SHARED_MEMORY:
        return warning_finding(
            str(SHARED_MEMORY), space, "docker run --shm-size=8g, or set TMPDIR to a fast disk: new weights go there"
        )
    return ok_finding(str(SHARED_MEMORY), space)


def _check_disk(name: str, directory: Path, contents: str) -> DoctorFinding:
    free = shutil.disk_usage(directory).free
    space = f"{_format_gib(free)} free in {directory}"
    if not os.access(directory, os.W_OK):
        return failed_finding(name, f"{directory} cannot be written to", f"another directory: {contents}")
    if free < LEAST_DISK:
        return failed_finding(name, space, f"make room: {contents}")
    if free < GOOD_DISK:
        return warning_finding(
            name, space, f"make room, since {contents}: a checkpoint is three times the float32 weights"
        )
    return ok_finding(name, space)


def _check_loopback() -> DoctorFinding:
    """Listen on a loopback port and connect to it, as all workers and servers of a merge do."""
    try:
        with socket.create_server(("127.0.0.1", 0)) as server:
            server.settimeout(LOOPBACK_TIMEOUT_S)
            port = server.getsockname()[1]
            with socket.create_connection(("127.0.0.1", port), timeout=LOOPBACK_TIMEOUT_S):
                server.accept()[0].close()
    except OSError as error:
        return failed_finding(
            "loopback", f"127.0.0.1: {error}", "allow programs to listen on 127.0.0.1: a sandbox or firewall forbids it"
        )
    return ok_finding("loopback", f"a port of 127.0.0.1 answers ({port})")


def _check_gpus() -> DoctorFinding:
    smi = shutil.which("nvidia-smi")
    if smi is None:
        return ok_finding("GPUs", "none: everything runs on the processor")
    command = [smi, "--query-gpu=name,memory.total,memory.used", "--format=csv,noheader"]
    try:
        process = subprocess.run(command, capture_output=True, text=True, timeout=SMI_TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired:
        return failed_finding(
            "GPUs", f"nvidia-smi is silent for {SMI_TIMEOUT_S:g} s", "the driver hangs: restart the machine"
        )
    if process.returncode:
        return warning_finding(
            "GPUs",
            (process.stdout or process.stderr).strip().partition("\n")[0],
            "mend the driver, or ignore it and merge on the processor",
        )
    gpus = "; ".join(process.stdout.strip().splitlines())
    if (installed_version("torch") or "").endswith("+cpu"):
        return warning_finding(
            "GPUs", f"{gpus}; torch is built for CPUs", "pip install 'opd-merge[gpu]' in a new environment: docs/gpu.md"
        )
    return ok_finding("GPUs", gpus)
