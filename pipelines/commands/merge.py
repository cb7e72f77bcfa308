"""`opd merge`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from opd.run_dir import RunPaths
from pipelines.commands import completion
from pipelines.commands.report import print_report
from pipelines.commands.shell import MaybePipelineArgument, SetOption, examples, run_root, say

app = typer.Typer()


ResumeOption = Annotated[
    Path | None,
    typer.Option(
        metavar="RUN_DIR",
        help="Go on with an interrupted run; PIPELINE and --set may change some keys.",
        autocompletion=completion.runs,
    ),
]


@app.command(
    epilog=examples(
        "opd merge quickstart",
        "opd merge mine.yaml --set trainer.steps=50 --run-dir runs/short",
        "opd merge --resume runs/quickstart",
    )
)
def merge(
    pipeline: MaybePipelineArgument = None,
    run_dir: Annotated[Path | None, typer.Option(help="Where the run lives. Default: runs/NAME.")] = None,
    overrides: SetOption = None,
    resume: ResumeOption = None,
    resume_from: Annotated[
        str | None, typer.Option(help="latest (default), latest-valid (pass over damaged ones), or a step.")
    ] = None,
    no_cache: Annotated[
        bool,
        typer.Option("--no-cache", help="Take every exam here, whatever other runs measured: evaluate.cache=false."),
    ] = False,
) -> None:
    """Merge experts into one student; prints what each domain gained."""
    if pipeline is None and resume is None:
        raise typer.BadParameter("give a PIPELINE, or --resume RUN_DIR")
    if resume is not None and run_dir:
        raise typer.BadParameter("--resume names the run directory; --run-dir does not go with it")
    if resume is None and resume_from:
        raise typer.BadParameter("--resume-from goes with --resume RUN_DIR")
    if no_cache:
        overrides = [*(overrides or []), "evaluate.cache=false"]
    from opd.config import load_pipeline
    from pipelines.catalog import find
    from pipelines.merging.first_look import first_look

    config = None if pipeline is None else load_pipeline(find(pipeline), overrides)
    first_look(config, resume or run_root(run_dir, config.name if config else ""), resumes=resume is not None)
    from pipelines.merging import rounds

    if resume is not None:
        paths = RunPaths(resume)
        work = rounds.reopen(paths.root, config, overrides, resume_from or "latest", say)
    else:
        assert config is not None
        paths = RunPaths(run_root(run_dir, config.name))
        work = rounds.begin(config, paths.root, say)
    print_report(work.carry_out())
    typer.echo(f"model: {paths.model}\nreport: {paths.page}")
