"""The model that a command is given: the one that a run left, or any Hugging Face directory. Needs no torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from experts.model_dir import ModelInfo, inspect_model
from opd.config import PipelineConfig, load_run_pipeline
from opd.errors import RunDirError
from opd.report import read_run
from opd.run.paths import RunPaths
from opd.text import quote_for_shell
from pipelines.draft import find_served_draft


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalModel:
    """A model directory that was inspected, and the pipeline of the run that left it."""

    path: Path
    info: ModelInfo
    config: PipelineConfig | None = None
    """The pipeline of the run that left the model; None for any other model."""

    @property
    def draft(self) -> Path | None:
        """Directory of the draft that learned beside the model; None if there is none that vLLM can serve."""
        return find_served_draft(self.path)

    @property
    def name(self) -> str:
        """Name for people: that of its run, else that of its directory."""
        return self.config.name if self.config else self.path.resolve().name


def find_model(directory: Path, tell: Callable[[str], None]) -> LocalModel:
    """Return the model of a run directory, or of a directory with a model; `tell` gets a warning if the run went on after it
    left this model.

    Raises: RunDirError for a run that has left no model yet; ModelError for a directory that is no model.
    """
    paths = RunPaths(directory)
    if not paths.is_run:
        return LocalModel(path=directory, info=inspect_model(directory, hash_weights=False))
    if not paths.model.is_dir():
        raise RunDirError.at(
            paths.model,
            found="no such directory: the merge has not come to its end",
            wanted="the model that a finished merge leaves",
            fix=f"`opd merge --resume {quote_for_shell(directory)}` finishes it",
        )
    if not read_run(directory).finished:
        tell(f"warning: {directory} is not finished: {paths.model} is the model of an earlier end")
    config = load_run_pipeline(paths.pipeline)
    return LocalModel(path=paths.model, info=inspect_model(paths.model, hash_weights=False), config=config)
