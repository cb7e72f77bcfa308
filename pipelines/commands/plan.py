"""`opd plan`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from pipelines.commands import completion
from pipelines.commands.shell import MaybePipelineArgument, SetOption, help_examples, print_line, print_table

app = typer.Typer()

CLUSTER_COLUMNS = ("cluster", "machines", "GPUs of each", "GiB of each", "cores", "memory [GiB]")
LIST = "list"
"""The value of `--cluster` that prints the shipped specs."""


@app.command(
    epilog=help_examples(
        "opd plan quickstart",
        "opd plan --cluster list",
        "opd plan merge-7b --cluster 8-gpus",
        "opd plan mine.yaml --json",
    )
)
def plan(
    pipeline: MaybePipelineArgument = None,
    cluster: Annotated[
        str | None,
        typer.Option(
            help="A cluster spec, or the name of a shipped one; `list` shows these. Default: two-cores. See docs/plan.md.",
            autocompletion=completion.complete_clusters,
        ),
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
    """Work out what a merge needs and how long it takes, from configs alone: no weights, no compute; exit code 1 if it does not fit."""
    if cluster == LIST:
        if as_json:
            raise typer.BadParameter("--cluster list is a table: leave --json out")
        print_table("shipped clusters", CLUSTER_COLUMNS, list_clusters())
        return
    if pipeline is None:
        raise typer.BadParameter("give a PIPELINE, or --cluster list")
    from opd.config import load_pipeline
    from pipelines.catalog import find_pipeline
    from pipelines.plan.advice import advise_changes
    from pipelines.plan.measure import cluster_spec
    from pipelines.plan.plan import make_plan
    from pipelines.plan.spec import with_lengths
    from pipelines.plan.tables import plan_tables
    from pipelines.sizing.target_log import SMALLER_LOG, find_full_disk

    config = load_pipeline(find_pipeline(pipeline), overrides)
    spec = cluster_spec(cluster, measure, config.student.model)
    spec = with_lengths(spec, prompt_tokens, response_tokens, tail)
    merge_plan = make_plan(config, spec)
    if as_json:
        typer.echo(json.dumps(merge_plan.to_json(), indent=2))
    else:
        for table in plan_tables(merge_plan):
            print_table(table.title, table.columns, table.rows)
        for note in merge_plan.notes:
            print_line(f"note: {note}", err=False)
        if shortage := find_full_disk(merge_plan.log, Path("runs")):
            print_line(f"note: on this machine {shortage}: {SMALLER_LOG}", err=False)
        if not merge_plan.fits:
            print_line(f"does not fit: {advise_changes(config, spec)}", err=False)
    if not merge_plan.fits:
        raise typer.Exit(1)


def list_clusters() -> list[tuple[str, ...]]:
    """Return a row for each shipped cluster spec: name, machines, and what each of them has."""
    from pipelines.plan.spec import load_spec, shipped_specs

    specs = {name: load_spec(name) for name in shipped_specs()}
    return [
        (
            name,
            str(spec.machines),
            str(spec.machine.gpus),
            f"{spec.machine.gpu_memory >> 30}" if spec.machine.gpus else "-",
            str(spec.machine.cores),
            f"{spec.machine.memory >> 30}",
        )
        for name, spec in specs.items()
    ]
