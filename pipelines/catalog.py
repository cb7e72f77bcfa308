"""Finding a pipeline: a path, or the name of a shipped one."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path


def shipped() -> dict[str, Path]:
    """Name -> file of every pipeline that comes with the package."""
    return {
        p.name.removesuffix(".yaml"): Path(str(p))
        for p in sorted(files("pipelines").iterdir(), key=str)
        if p.name.endswith(".yaml")
    }


def find(name_or_path: str) -> Path:
    """A shipped pipeline's file, or the path as it is (whoever loads it says if it is missing)."""
    return shipped().get(name_or_path, Path(name_or_path))
