"""`opd plan`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from pipelines.commands.shell import PipelineArgument, SetOption, examples, print_table, say

app = typer.Typer()


@app.command(epilog=examples("opd plan quickstart", "opd plan merge-7b --cluster 8-gpus", "opd plan mine.yaml --json"))
def plan(
    pipeline: PipelineArgument,
    cluster: Annotated[
        str | None,
        typer.Option(help="A cluster spec, or the name of a shipped one; default: two-cores. See docs/plan.md."),
    ] = None,
    measure: Annotated[
        Path | None,
        typer.Option(help="Measure this machine for some seconds, write its spec to this file, and plan with it."),
    ] = None,
    prompt_tokens: Annotated[int | None, typer.Option(min=1, help="Tokens of a prompt.")] = None,
    response_tokens: Annotated[float | None, typer.Option(min=1, help="Median tokens of a response.")] = None,
    tail: Annotated[
        float | None, typer.Option(min=1, help="Length of the longest response in a hundred, in medians.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    overrides: SetOption = None,
) -> None:
    """What will a merge need, and how long will it take? From configs alone: no weights, no compute; exit code 1 if it does not fit."""
    from opd.config import load_pipeline
    from pipelines.catalog import find
    from pipelines.plan.measure import cluster_spec
    from pipelines.plan.plan import make_plan
    from pipelines.plan.spec import with_lengths
    from pipelines.plan.tables import tables

    config = load_pipeline(find(pipeline), overrides)
    spec = cluster_spec(cluster, measure, config.student.model)
    made = make_plan(config, with_lengths(spec, prompt_tokens, response_tokens, tail))
    if as_json:
        typer.echo(json.dumps(made.to_json(), indent=2))
    else:
        for table in tables(made):
            print_table(table.title, table.columns, table.rows)
        for note in made.notes:
            say(f"note: {note}", err=False)
    if not made.fits:
        raise typer.Exit(1)
