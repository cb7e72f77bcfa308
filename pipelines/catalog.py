"""Find a pipeline by its path or, if it is shipped, by its name."""

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
    """The file of a shipped pipeline, or the path unchanged; `load_pipeline` refuses a missing file."""
    return shipped().get(name_or_path, Path(name_or_path))
