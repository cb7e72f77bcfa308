"""`opd merge`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from opd.run_dir import RunPaths
from pipelines.commands.report import print_report
from pipelines.commands.shell import SetOption, run_root, say

if TYPE_CHECKING:
    from pipelines.merging.rounds import Rounds
    from pipelines.merging.run import Run

    Work = Run | Rounds

ExtendOption = Annotated[
    Path | None,
    typer.Option(
        metavar="RUN_DIR", help="Take --steps further steps in a finished or stopped run, as if it had been longer."
    ),
]
FromOption = Annotated[
    str | None,
    typer.Option(
        "--from",
        metavar="RUN_DIR@STEP",
        help="Begin a new run at a checkpoint of another one, with its weights and optimiser. PIPELINE: by default the other's.",
    ),
]
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
    extend: ExtendOption = None,
    steps: Annotated[int | None, typer.Option(metavar="N", help="With --extend: how many further steps.")] = None,
    start_from: FromOption = None,
    no_cache: Annotated[
        bool,
        typer.Option("--no-cache", help="Take every exam here, whatever other runs measured: evaluate.cache=false."),
    ] = False,
) -> None:
    """Merge experts into one student; prints what each domain gained."""
    _refuse_contradictions(pipeline, run_dir, (resume, resume_from), (extend, steps), start_from)
    if no_cache:
        overrides = [*(overrides or []), "evaluate.cache=false"]
    if resume is not None:
        work = _resumed(resume, pipeline, overrides, resume_from)
    elif extend is not None and steps is not None:
        work = _extended(extend, steps, overrides)
    else:
        work = _begun(pipeline, overrides, run_dir, start_from)
    print_report(work.carry_out())
    paths = RunPaths(work.root)
    typer.echo(f"model: {paths.model}\nreport: {paths.page}")


def _refuse_contradictions(
    pipeline: str | None,
    run_dir: Path | None,
    resume: tuple[Path | None, str | None],
    extend: tuple[Path | None, int | None],
    start_from: str | None,
) -> None:
    """Raises: typer.BadParameter for options that do not go together."""
    if sum(given is not None for given in (resume[0], extend[0], start_from)) > 1:
        raise typer.BadParameter("give one of --resume, --extend and --from")
    if pipeline is None and resume[0] is None and extend[0] is None and start_from is None:
        raise typer.BadParameter("give a PIPELINE, --resume RUN_DIR, --extend RUN_DIR or --from RUN_DIR@STEP")
    for name, given in (("--resume", resume[0]), ("--extend", extend[0])):
        if given is not None and run_dir:
            raise typer.BadParameter(f"{name} names the run directory; --run-dir does not go with it")
    if resume[0] is None and resume[1]:
        raise typer.BadParameter("--resume-from goes with --resume RUN_DIR")
    if (extend[0] is None) != (extend[1] is None):
        raise typer.BadParameter("--extend RUN_DIR and --steps N go together")
    if extend[0] is not None and pipeline is not None:
        raise typer.BadParameter("--extend takes the run's own pipeline; change keys of it with --set")


# Each imports what needs torch only after its own checks.


def _begun(pipeline: str | None, overrides: list[str] | None, run_dir: Path | None, start_from: str | None) -> Work:
    """A run that begins, from the student or from a checkpoint of another run."""
    from opd.config import load_pipeline
    from pipelines.catalog import find
    from pipelines.merging.origin import origin_of

    origin = None if start_from is None else origin_of(start_from)
    config = load_pipeline(find(pipeline) if pipeline or origin is None else origin.paths.pipeline, overrides)
    root = run_root(run_dir, config.name)
    if origin is not None:
        from pipelines.merging.branch import branch

        return branch(config, origin, root)
    from pipelines.merging import rounds

    return rounds.begin(config, root, say)


def _resumed(root: Path, pipeline: str | None, overrides: list[str] | None, resume_from: str | None) -> Work:
    from opd.config import load_pipeline
    from pipelines.catalog import find

    config = None if pipeline is None else load_pipeline(find(pipeline), overrides)
    from pipelines.merging import rounds

    return rounds.reopen(root, config, overrides, resume_from or "latest", say)


def _extended(root: Path, steps: int, overrides: list[str] | None) -> Work:
    from pipelines.merging.longer import longer

    further = longer(RunPaths(root), steps)
    from pipelines.merging import run

    return run.extend(root, further, overrides)
