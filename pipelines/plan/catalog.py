"""The shipped plans: pipelines that are for planning alone, each with a cluster of the same name."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path

from pipelines.catalog import find

SHIPPED = Path(str(files("pipelines.plan"))) / "shipped"
"""Clusters, pipelines and shapes of models that come with the package."""


def planned() -> dict[str, Path]:
    """Name -> file of every pipeline that is shipped for planning."""
    return {file.stem: file for file in sorted((SHIPPED / "pipelines").glob("*.yaml"))}


def find_planned(name_or_path: str) -> Path:
    """The file of a shipped plan or pipeline, or the path unchanged."""
    return planned().get(name_or_path) or find(name_or_path)
