"""Return what Tab offers in a shell; `opd --install-completion` sets it up. Nothing large is imported.

Each `complete_` function gets the word as far as it is typed, and returns the words that it may become.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

KEYS = Path(__file__).with_name("keys.txt")
"""File of all keys of a pipeline, except those below names that users choose; `docs/make_reference.py` writes it."""

METHODS = ("linear", "task_arithmetic", "ties", "dare_ties", "slerp", "off_policy", "mixed_sft", "opd")
"""The methods of `pipelines.baselines.jobs`, which takes too long to import here."""


def complete_pipelines(incomplete: str) -> list[str]:
    """Return shipped pipelines, and YAML files."""
    return complete_shipped_pipelines(incomplete) + _matching_files(incomplete)


def complete_shipped_pipelines(incomplete: str) -> list[str]:
    """Return shipped pipelines alone."""
    from pipelines.catalog import shipped_pipelines

    return _matching_names(shipped_pipelines(), incomplete)


def complete_training_specs(incomplete: str) -> list[str]:
    """Return shipped training specs, and YAML files."""
    from experts.spec import list_shipped_specs

    return _matching_names(list_shipped_specs(), incomplete) + _matching_files(incomplete)


def complete_experts(incomplete: str) -> list[str]:
    """Return experts of the registry that a command without `--registry` uses."""
    from experts.registry import Registry, default_root
    from opd.errors import OpdError

    try:
        return _matching_names(Registry(default_root()).names(), incomplete)
    except OpdError:
        return []  # nobody wants an error message in the middle of a line


def complete_runs(incomplete: str) -> list[str]:
    """Return run directories under `runs/`, and directories on the way to others, which end in a slash."""
    from opd.run.paths import RunPaths

    usual_runs = [str(path) for path in Path("runs").glob("*") if path.is_dir()]
    paths = [
        *_matching_names(usual_runs, incomplete),
        *(path for path in _matching_paths(incomplete) if Path(path).is_dir()),
    ]
    return [path if RunPaths(Path(path)).is_run else f"{path}/" for path in dict.fromkeys(paths)]


def complete_runs_and_pipelines(incomplete: str) -> list[str]:
    """Return run directories and pipelines, for commands that take either."""
    return list(dict.fromkeys(complete_runs(incomplete) + complete_pipelines(incomplete)))


def complete_environments(incomplete: str) -> list[str]:
    """Return environments that come with us."""
    from opd.environments import ENVIRONMENTS

    return _matching_names(ENVIRONMENTS, incomplete)


def complete_settings(incomplete: str) -> list[str]:
    """Return the keys of a pipeline for `--set KEY=VALUE`, from a file: building the config's classes would take longer than a
    Tab may."""
    keys = KEYS.read_text(encoding="utf-8").splitlines() if "=" not in incomplete else []
    return [f"{key}=" for key in _matching_names(keys, incomplete)]


def complete_methods(incomplete: str) -> list[str]:
    """Return methods for a comma-separated list, each with the methods before it that are typed already."""
    typed, comma, start = incomplete.rpartition(",")
    return [f"{typed}{comma}{name}" for name in _matching_names(METHODS, start)]


def complete_clusters(incomplete: str) -> list[str]:
    """Return shipped cluster specs, and YAML files."""
    from pipelines.catalog import PLANS

    shipped = sorted(file.stem for file in (PLANS / "clusters").glob("*.yaml"))
    return _matching_names(["list", *shipped], incomplete) + _matching_files(incomplete)


def complete_suites(incomplete: str) -> list[str]:
    """Return suites of prompts that need no download."""
    from experts.suites import SUITES

    return _matching_names(SUITES, incomplete)


def _matching_names(names: Iterable[str], incomplete: str) -> list[str]:
    return sorted(name for name in names if name.startswith(incomplete))


def _matching_files(incomplete: str) -> list[str]:
    """Return YAML files that begin so, and directories, which may hold more of them."""
    paths = _matching_paths(incomplete)
    return [path for path in paths if path.endswith((".yaml", ".yml"))] + [f"{p}/" for p in paths if Path(p).is_dir()]


def _matching_paths(incomplete: str) -> list[str]:
    """Return paths that begin with exactly these characters; hidden files only if the name begins with a dot."""
    parent, start = os.path.split(incomplete)
    directory = Path(parent or ".")
    names = sorted(path.name for path in directory.iterdir()) if directory.is_dir() else []
    matching = [name for name in names if name.startswith(start) and (start or not name.startswith("."))]
    return [os.path.join(parent, name) for name in matching]  # noqa: PTH118 a Path would drop the `./` that was written
