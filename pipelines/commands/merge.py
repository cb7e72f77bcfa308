"""`opd merge`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from opd.run_dir import RunPaths
from pipelines.commands.shell import SetOption, run_root
from pipelines.commands.shown import JsonOption, QuietOption, Shown

if TYPE_CHECKING:
    from pipelines.merging.rounds import Rounds
    from pipelines.merging.run import Run

app = typer.Typer()


@app.command()
def merge(
    pipeline: Annotated[str | None, typer.Argument(help="A pipeline file, or the name of a shipped one.")] = None,
    run_dir: Annotated[Path | None, typer.Option(help="Where the run lives. Default: runs/NAME.")] = None,
    overrides: SetOption = None,
    resume: Annotated[
        Path | None,
        typer.Option(metavar="RUN_DIR", help="Go on with an interrupted run; PIPELINE and --set may change some keys."),
    ] = None,
    resume_from: Annotated[
        str | None, typer.Option(help="latest (default), latest-valid (pass over damaged ones), or a step.")
    ] = None,
    no_cache: Annotated[
        bool,
        typer.Option("--no-cache", help="Take every exam here, whatever other runs measured: evaluate.cache=false."),
    ] = False,
    quiet: QuietOption = False,
    as_json: JsonOption = False,
) -> None:
    """Merge experts into one student; prints what each domain gained.

    On a terminal it shows one screen while it goes on, elsewhere a line for each step.
    """
    _refuse_contradictions(pipeline, run_dir, resume, resume_from)
    if no_cache:
        overrides = [*(overrides or []), "evaluate.cache=false"]
    with Shown(quiet, as_json) as shown:
        with shown.reading():
            if resume is not None:
                paths, work = _resumed(resume, pipeline, overrides, resume_from, shown.tell)
            else:
                paths, work = _begun(pipeline, overrides, run_dir, shown.tell)
        shown.finished(paths, work.carry_out(shown.around))


def _refuse_contradictions(
    pipeline: str | None, run_dir: Path | None, resume: Path | None, resume_from: str | None
) -> None:
    """Raises: typer.BadParameter for options that do not go together."""
    if pipeline is None and resume is None:
        raise typer.BadParameter("give a PIPELINE, or --resume RUN_DIR")
    if resume is not None and run_dir:
        raise typer.BadParameter("--resume names the run directory; --run-dir does not go with it")
    if resume is None and resume_from:
        raise typer.BadParameter("--resume-from goes with --resume RUN_DIR")


def _begun(
    pipeline: str | None, overrides: list[str] | None, run_dir: Path | None, tell: Callable[[str], None]
) -> tuple[RunPaths, Run | Rounds]:
    """A run that begins, and its run directory. Raises: OpdError before anything is written."""
    from opd.config import load_pipeline
    from pipelines.catalog import find

    assert pipeline is not None
    config = load_pipeline(find(pipeline), overrides)
    paths = RunPaths(run_root(run_dir, config.name))
    from pipelines.merging import rounds

    return paths, rounds.begin(config, paths.root, tell)


def _resumed(
    root: Path,
    pipeline: str | None,
    overrides: list[str] | None,
    resume_from: str | None,
    tell: Callable[[str], None],
) -> tuple[RunPaths, Run | Rounds]:
    """A run that goes on, and its run directory. Raises: OpdError, and then nothing is written."""
    from opd.config import load_pipeline
    from pipelines.catalog import find

    config = None if pipeline is None else load_pipeline(find(pipeline), overrides)
    from pipelines.merging import rounds

    return RunPaths(root), rounds.reopen(root, config, overrides, resume_from or "latest", tell)
