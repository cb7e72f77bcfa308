"""Quick checks of a new merge, before `opd merge` imports the engines' packages, which takes seconds."""

from __future__ import annotations

from pathlib import Path

from opd.config import PipelineConfig
from pipelines.inputs.early_checks import refuse_at_once
from pipelines.merging.directory import refuse_existing


def check_new_run(config: PipelineConfig, root: Path) -> None:
    """Check that a new run's directory is free, and that everything is there that its pipeline names. Raises: OpdError."""
    refuse_existing(root)
    refuse_at_once(config)
