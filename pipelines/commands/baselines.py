"""`opd baseline` and `opd compare`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from opd.run.paths import ComparisonPaths, RunPaths
from opd.text import format_or_dash
from pipelines.commands import completion
from pipelines.commands.shell import (
    PipelineArgument,
    SetOption,
    avoid_spinning,
    end_command,
    help_examples,
    print_line,
    print_table,
    run_root,
)
from pipelines.interrupts import Interrupted

if TYPE_CHECKING:
    from opd.config import PipelineConfig
    from opd.evaluation.baselines import BaselineResult

app = typer.Typer()

METHODS_HELP = f"Comma-separated: {', '.join(completion.METHODS)}."
ShareOption = Annotated[
    str | None, typer.Option(help="Comma-separated shares of the merge's training, e.g. 0.1,0.3,1. Default: 1.")
]
RESULT_COLUMNS = ("method", "share", "response tokens", "mean accuracy")


@app.command(
    epilog=help_examples(
        "opd baseline runs/quickstart --method linear,ties",
        "opd baseline runs/quickstart --method off_policy --share 0.1,1",
    )
)
def baseline(
    target: Annotated[
        str,
        typer.Argument(
            metavar="RUN_DIR|PIPELINE",
            help="A merge's run directory, or a pipeline.",
            autocompletion=completion.complete_runs_and_pipelines,
        ),
    ],
    method: Annotated[str, typer.Option(help=METHODS_HELP, autocompletion=completion.complete_methods)],
    share: ShareOption = None,
    seed: Annotated[int | None, typer.Option(min=0, help="Default: the pipeline's.")] = None,
    run_dir: Annotated[
        Path | None, typer.Option(help="With a PIPELINE: where results go. Default: runs/NAME-baselines.")
    ] = None,
    keep_models: Annotated[bool, typer.Option("--keep-models", help="Keep the models that were compared.")] = False,
    overrides: SetOption = None,
) -> None:
    """Merge the same experts in another way, and measure the result on the same exams."""
    avoid_spinning()
    from pipelines.baselines.jobs import parse_methods, parse_shares, plan_jobs
    from pipelines.inputs.early_checks import refuse_at_once

    methods, shares = parse_methods(method), parse_shares(share) if share is not None else None
    config, root = _find_merge(target, run_dir, overrides)
    jobs = plan_jobs(config, root, methods, shares, seed)
    refuse_at_once(config)
    from pipelines.baselines.run import compute_results

    try:
        results = compute_results(jobs, print_line, keep_models)
    except Interrupted as stopped:
        end_command(f"{stopped}, or the same command again", 128 + stopped.number)
    print_table(config.name, RESULT_COLUMNS, [_result_cells(result) for result in results])
    typer.echo(f"results: {RunPaths(root).baselines}")


def _find_merge(target: str, run_dir: Path | None, overrides: list[str] | None) -> tuple[PipelineConfig, Path]:
    """Return the pipeline of the merge, and the run directory that gets the baselines' results."""
    from opd.config import load_pipeline
    from pipelines.baselines.jobs import open_run
    from pipelines.catalog import find_pipeline

    if Path(target).is_dir():
        if run_dir:
            raise typer.BadParameter("--run-dir goes with a PIPELINE; a run directory is where its results go")
        return open_run(Path(target), overrides), Path(target)
    config = load_pipeline(find_pipeline(target), overrides)
    return config, run_root(run_dir, f"{config.name}-baselines")


def _result_cells(result: BaselineResult) -> tuple[str, ...]:
    """Return the cells of `RESULT_COLUMNS`."""
    share, tokens = format_or_dash(result.token_share, "g"), format_or_dash(result.tokens, ",")
    return result.label, share, tokens, f"{result.accuracy:.3f}"


@app.command(
    epilog=help_examples("opd compare quickstart", "opd compare quickstart --seeds 0,1 --method opd,linear --share 1")
)
def compare(
    pipeline: PipelineArgument,
    seeds: Annotated[str, typer.Option(help="Comma-separated, at most ten.")] = "0,1,2",
    method: Annotated[
        str | None,
        typer.Option(
            help="As of `opd baseline`, comma-separated. Default: all.", autocompletion=completion.complete_methods
        ),
    ] = None,
    share: Annotated[str, typer.Option(help="Shares of the merge's training for methods that train.")] = "0.1,0.3,1",
    run_dir: Annotated[Path | None, typer.Option(help="Where it all goes. Default: runs/NAME-compare.")] = None,
    overrides: SetOption = None,
) -> None:
    """A merge and every baseline, over several seeds, as one table and one picture; goes on where it was interrupted."""
    avoid_spinning()
    from opd.config import load_pipeline
    from pipelines.baselines.jobs import METHODS, parse_methods, parse_seeds, parse_shares
    from pipelines.catalog import find_pipeline
    from pipelines.inputs.early_checks import refuse_at_once

    numbers, methods, shares = parse_seeds(seeds), parse_methods(method or ",".join(METHODS)), parse_shares(share)
    config = load_pipeline(find_pipeline(pipeline), overrides)
    refuse_at_once(config)
    paths = ComparisonPaths(run_root(run_dir, f"{config.name}-compare"))
    from pipelines.baselines import comparison

    try:
        rows = comparison.run_comparison(config, paths.root, numbers, methods, shares, print_line)
    except Interrupted as stopped:
        end_command("stopped, checkpoint written; go on with the same command", 128 + stopped.number)
    print_table(config.name, comparison.COLUMNS, [comparison.row_cells(row) for row in rows])
    typer.echo(f"table: {paths.table}\npicture: {paths.picture}")
