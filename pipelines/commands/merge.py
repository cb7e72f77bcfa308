"""`opd merge`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from pipelines.commands import completion
from pipelines.commands.merge_options import MergeArguments
from pipelines.commands.merge_output import JsonOption, MergeOutput, QuietOption
from pipelines.commands.shell import MaybePipelineArgument, SetOption, help_examples

ResumeOption = Annotated[
    Path | None,
    typer.Option(
        metavar="RUN_DIR",
        help="Go on with an interrupted run; PIPELINE and --set may change some keys.",
        autocompletion=completion.complete_runs,
    ),
]
ExtendOption = Annotated[
    Path | None,
    typer.Option(
        metavar="RUN_DIR",
        help="Take --steps further steps in a finished or stopped run, as if it had been longer.",
        autocompletion=completion.complete_runs,
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


@app.command(
    epilog=help_examples(
        "opd merge quickstart",
        "opd merge mine.yaml --set trainer.steps=50 --run-dir runs/short",
        "opd merge --resume runs/quickstart",
        "opd merge --extend runs/quickstart --steps 100",
        "opd merge mine.yaml --from runs/quickstart@200 --run-dir runs/branch",
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
    extend: ExtendOption = None,
    steps: Annotated[int | None, typer.Option(metavar="N", help="With --extend: how many further steps.")] = None,
    start_from: FromOption = None,
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
    if no_cache:
        overrides = [*(overrides or []), "evaluate.cache=false"]
    arguments = MergeArguments(
        pipeline=pipeline,
        run_dir=run_dir,
        overrides=overrides,
        resume=resume,
        resume_from=resume_from,
        extend=extend,
        steps=steps,
        start_from=start_from,
    )
    with MergeOutput(quiet, as_json) as merge_output:
        with merge_output.show_reading():
            paths, work = arguments.read(merge_output.tell)
        merge_output.print_result(paths, work.carry_out(merge_output.callbacks))
