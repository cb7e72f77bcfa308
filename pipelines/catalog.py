"""Find a pipeline by its path or, if it is shipped, by its name."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path

from opd.settings.yaml_files import no_such_yaml_error

PLANS = Path(str(files("pipelines"))) / "plan" / "shipped"
"""Clusters, pipelines and shapes of models for `opd plan`."""


def shipped_pipelines() -> dict[str, Path]:
    """Name -> file of every pipeline that comes with the package."""
    return {
        p.name.removesuffix(".yaml"): Path(str(p))
        for p in sorted(files("pipelines").iterdir(), key=str)
        if p.name.endswith(".yaml")
    }


def shipped_plans() -> dict[str, Path]:
    """Name -> file of every pipeline that is shipped for `opd plan` alone: its models and prompts are nowhere."""
    return {file.stem: file for file in sorted((PLANS / "pipelines").glob("*.yaml"))}


def find_pipeline(name_or_path: str) -> Path:
    """Return the file of a shipped pipeline, or the path of one of the user's. Raises: ConfigError if there is neither."""
    shipped, path = shipped_plans() | shipped_pipelines(), Path(name_or_path)
    if name_or_path not in shipped and not path.exists():
        raise no_such_yaml_error(path, shipped, "a shipped pipeline", "`opd pipelines list` names the shipped ones")
    return shipped.get(name_or_path, path)
