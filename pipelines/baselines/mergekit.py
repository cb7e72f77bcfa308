"""mergekit, installed on first use apart from our own packages, and run in a process of its own.

It works with our versions of torch and transformers. Only mergekit itself and the one dependency that we lack are installed,
into a directory of the user's cache that only this process has on its path.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import yaml
from filelock import FileLock, Timeout

from experts.model_dir import inspect_model
from opd.errors import RunError
from opd.files import blake3_file, cache_dir, replace_dir
from opd.settings.strict import NUMPY_SEEDS

REQUIREMENTS = Path(__file__).with_name("mergekit.txt")
INSTALL_TIMEOUT_S = 600
Recipe = dict[str, Any]
"""The contents of one YAML document for mergekit."""


def environment_dir() -> Path:
    """Return the directory that mergekit is imported from; it need not exist yet."""
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    return cache_dir() / f"mergekit-py{version}-{blake3_file(REQUIREMENTS)[:12]}"


def mergekit_environment(tell: Callable[[str], None]) -> Path:
    """Return `environment_dir`, and install mergekit there if it is missing. Raises: RunError."""
    home = environment_dir()
    if home.exists():
        return home
    home.parent.mkdir(parents=True, exist_ok=True)
    try:
        with FileLock(home.with_suffix(".lock"), timeout=INSTALL_TIMEOUT_S):
            if not home.exists():
                tell(f"installing mergekit into {home}, once")
                with tempfile.TemporaryDirectory(dir=home.parent) as scratch:
                    target = Path(scratch) / "packages"
                    _install_mergekit(target)
                    replace_dir(target, home)
    except Timeout:
        raise RunError(f"{home}: another process has been installing there for {INSTALL_TIMEOUT_S} s") from None
    return home


def merge_weights(recipes: Mapping[str, Recipe], out: Path, *, seed: int, timeout_s: float, home: Path) -> None:
    """Make the models `out/NAME`, one for each recipe; `out` is emptied first. `home` is the `mergekit_environment`.

    Raises: RunError if mergekit fails or is not done after `timeout_s`; ModelError if it leaves no sound model.
    """
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    file = out / "recipes.yaml"
    file.write_text(yaml.safe_dump_all([{"name": n, **r} for n, r in recipes.items()], sort_keys=False))
    # -P: without it Python would import modules from the current directory first.
    command = ["-P", "-m", "mergekit.scripts.multimerge", str(file), "--intermediate-dir", str(out)]
    paths = [str(home), *filter(None, [os.environ.get("PYTHONPATH")])]
    env = {"PYTHONPATH": os.pathsep.join(paths), "HF_HUB_OFFLINE": "1", "OMP_WAIT_POLICY": "PASSIVE"}
    _run_python([*command, "--random-seed", str(seed % NUMPY_SEEDS), "--quiet"], "mergekit", timeout_s, env)
    for name in recipes:
        inspect_model(out / name, hash_weights=False)


def _install_mergekit(target: Path) -> None:
    """Install mergekit with pip if the interpreter has it, else with uv. Raises: RunError."""
    options = ["--target", str(target), "--no-deps", "--require-hashes", "-r", str(REQUIREMENTS)]
    if find_spec("pip"):
        # One retry instead of pip's five: without a network the error should come at once.
        command = ["-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--retries", "1", *options]
    elif uv := shutil.which("uv"):
        command = [uv, "pip", "install", "--quiet", "--python", sys.executable, *options]
    else:
        raise RunError(f"mergekit cannot be installed: {sys.executable} has no pip, and there is no uv")
    try:
        _run_python(command, "the installation of mergekit", INSTALL_TIMEOUT_S, {})
    except RunError as error:
        raise RunError(
            f"{error}\nmergekit is needed for merges of weights, and its installation needs the package index once; "
            "the methods off_policy, mixed_sft and opd work without it"
        ) from None


def _run_python(command: list[str], task: str, timeout_s: float, env: Mapping[str, str]) -> None:
    """Run Python, or a program given by its absolute path. Raises: RunError with the last lines of its output."""
    program = command if Path(command[0]).is_absolute() else [sys.executable, *command]
    try:
        process = subprocess.run(
            program,
            env={**os.environ, **env},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            timeout=timeout_s,
        )
    except subprocess.TimeoutExpired:
        raise RunError(f"{task} took longer than {timeout_s:.0f} s") from None
    if process.returncode:
        raise RunError(f"{task} failed (exit code {process.returncode}): {' | '.join(process.stdout.splitlines()[-3:])}")
