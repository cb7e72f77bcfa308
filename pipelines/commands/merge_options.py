"""Command line of `opd merge`: a run that begins, goes on, grows longer, or branches from another one."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from opd.run.paths import RunPaths
from opd.text import Tell
from pipelines.commands.shell import run_root

if TYPE_CHECKING:
    from pipelines.merging.rounds import Rounds
    from pipelines.merging.run import MergeRun


@dataclass(frozen=True, slots=True, kw_only=True)
class MergeArguments:
    """Arguments and options that say which run is meant, and from where it goes on."""

    pipeline: str | None
    run_dir: Path | None
    overrides: list[str] | None
    resume: Path | None
    resume_from: str | None
    extend: Path | None
    steps: int | None
    start_from: str | None

    def __post_init__(self) -> None:
        """Refuse options that do not go together. Raises: BadParameter."""
        if sum(value is not None for value in (self.resume, self.extend, self.start_from)) > 1:
            raise typer.BadParameter("give one of --resume, --extend and --from")
        if all(value is None for value in (self.pipeline, self.resume, self.extend, self.start_from)):
            raise typer.BadParameter("give a PIPELINE, --resume RUN_DIR, --extend RUN_DIR or --from RUN_DIR@STEP")
        for name, value in (("--resume", self.resume), ("--extend", self.extend)):
            if value is not None and self.run_dir:
                raise typer.BadParameter(f"{name} names the run directory; --run-dir does not go with it")
        if self.resume is None and self.resume_from:
            raise typer.BadParameter("--resume-from goes with --resume RUN_DIR")
        if (self.extend is None) != (self.steps is None):
            raise typer.BadParameter("--extend RUN_DIR and --steps N go together")
        if self.extend is not None and self.pipeline is not None:
            raise typer.BadParameter("--extend takes the run's own pipeline; change keys of it with --set")

    def read(self, tell: Tell) -> tuple[RunPaths, MergeRun | Rounds]:
        """Read and check everything that the run needs. Returns its run directory and the merge in it. Raises: OpdError."""
        if self.resume is not None:
            return RunPaths(self.resume), self._resume_run(self.resume, tell)
        if self.extend is not None and self.steps is not None:
            return RunPaths(self.extend), self._extend_run(self.extend, self.steps)
        return self._begin_run(tell)

    # Each of these imports modules that need torch only after the checks that do without.

    def _resume_run(self, root: Path, tell: Tell) -> MergeRun | Rounds:
        from opd.config import load_pipeline
        from pipelines.catalog import find_pipeline
        from pipelines.merging.directory import refuse_no_run

        config = None if self.pipeline is None else load_pipeline(find_pipeline(self.pipeline), self.overrides)
        refuse_no_run(RunPaths(root))
        from pipelines.merging import rounds

        return rounds.reopen_rounds(root, config, self.overrides, self.resume_from or "latest", tell)

    def _extend_run(self, root: Path, steps: int) -> MergeRun:
        from pipelines.merging.extension import plan_extension

        extension = plan_extension(RunPaths(root), steps)
        from pipelines.merging import run

        return run.extend(root, extension, self.overrides)

    def _begin_run(self, tell: Tell) -> tuple[RunPaths, MergeRun | Rounds]:
        """Return the directory and the merge of a new run, which begins with the student or at a checkpoint of another run."""
        from opd.config import load_pipeline
        from pipelines.catalog import find_pipeline
        from pipelines.inputs.early_checks import refuse_at_once
        from pipelines.merging.directory import refuse_existing
        from pipelines.merging.origin import find_origin

        origin = None if self.start_from is None else find_origin(self.start_from)
        file = find_pipeline(self.pipeline) if self.pipeline else origin.paths.pipeline if origin else None
        assert file is not None, "`__post_init__` refuses that"
        config = load_pipeline(file, self.overrides)
        paths = RunPaths(run_root(self.run_dir, config.name))
        if origin is not None:
            from pipelines.merging.branch import begin_branch

            return paths, begin_branch(config, origin, paths.root)
        refuse_existing(paths.root)
        refuse_at_once(config)
        from pipelines.merging import rounds

        return paths, rounds.begin_rounds(config, paths.root, tell)
