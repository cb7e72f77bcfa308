"""Settings of the environment that make a merge fail or hang without any explanation."""

from __future__ import annotations

import fcntl
import os
import resource
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

from opd.cluster.session import find_long_ray_variable
from pipelines.doctor.finding import DoctorFinding, failed_finding, ok_finding, warning_finding

LEAST_FILES = 1024
"""Fewest open files that a process should be allowed, because each worker of Ray holds dozens of sockets."""


def trap_findings(environ: Mapping[str, str] = os.environ) -> Iterator[DoctorFinding]:
    """Yield the findings about limits, environment variables and file locks."""
    findings = [
        finding
        for finding in (
            _check_file_limit(),
            _check_proxy(environ),
            _check_ray_address(environ),
            _check_socket_paths(environ),
            _check_file_locks(),
        )
        if finding
    ]
    yield from findings
    if not findings:
        yield ok_finding("traps", "none of those that we know")


def _check_file_limit() -> DoctorFinding | None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= LEAST_FILES:
        return None
    return warning_finding(
        "open files", f"at most {soft} a process", f"ulimit -n {LEAST_FILES if hard >= LEAST_FILES else hard}"
    )


def _check_proxy(environ: Mapping[str, str]) -> DoctorFinding | None:
    variable = next(
        (name for name in ("http_proxy", "HTTP_PROXY", "grpc_proxy", "all_proxy") if environ.get(name)), None
    )
    exceptions = environ.get("no_proxy", environ.get("NO_PROXY", ""))
    if variable is None or exceptions == "*" or "127.0.0.1" in exceptions:
        return None
    return warning_finding(
        "proxy",
        f"{variable} is set, and no_proxy does not name 127.0.0.1",
        "export no_proxy=127.0.0.1,localhost: calls between a merge's own processes would go to the proxy",
    )


def _check_ray_address(environ: Mapping[str, str]) -> DoctorFinding | None:
    if not environ.get("RAY_ADDRESS"):
        return None
    return warning_finding(
        "RAY_ADDRESS",
        environ["RAY_ADDRESS"],
        "unset RAY_ADDRESS; a pipeline names its cluster with cluster.address, and starts a Ray of its own without",
    )


def _check_socket_paths(environ: Mapping[str, str]) -> DoctorFinding | None:
    name = find_long_ray_variable(environ)
    if name is None:
        return None
    problem = f"{environ[name]}: Ray's sockets there have longer paths than Linux takes"
    return failed_finding(name, problem, "set RAY_TMPDIR to a shorter directory, for example RAY_TMPDIR=/tmp")


def _check_file_locks() -> DoctorFinding | None:
    """Find out if the working directory's file system has locks, by which a run directory knows that a merge is at work in it:
    some network file systems have none."""
    directory = Path.cwd()
    if not os.access(directory, os.W_OK):
        return None  # another check reports that
    try:
        with tempfile.TemporaryFile(dir=directory) as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        return failed_finding(
            "file locks", f"{directory}: {error.strerror}", "name a run directory on a local disk: --run-dir"
        )
    return None
