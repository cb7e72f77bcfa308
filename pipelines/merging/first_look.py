"""What `opd merge` looks at before it imports the engines' packages, which takes seconds."""

from __future__ import annotations

from pathlib import Path

from opd.config import PipelineConfig
from opd.run_dir import RunPaths
from pipelines.inputs.at_once import refuse_at_once
from pipelines.merging.directory import refuse_existing, refuse_no_run


def first_look(config: PipelineConfig | None, root: Path, *, resumes: bool) -> None:
    """Look at the run directory, and for a new run at everything that its pipeline names. Raises: OpdError.

    A resume compares its inputs with those that it began with, and refuses them in words of its own.
    """
    if resumes:
        refuse_no_run(RunPaths(root))
        return
    refuse_existing(root)
    if config is not None:
        refuse_at_once(config)
