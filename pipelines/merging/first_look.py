"""Quick checks of `opd merge`, before it imports the engines' packages, which takes seconds."""

from __future__ import annotations

from pathlib import Path

from opd.config import PipelineConfig
from pipelines.inputs.at_once import refuse_at_once
from pipelines.merging.directory import refuse_existing


def first_look(config: PipelineConfig, root: Path) -> None:
    """Look at the run directory of a new run, and at everything that its pipeline names. Raises: OpdError."""
    refuse_existing(root)
    refuse_at_once(config)
