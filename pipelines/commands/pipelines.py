"""The commands `opd pipelines ...`, which list and print pipelines, and print their JSON schema."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from pipelines.commands.shell import PipelineArgument, SetOption, help_examples, print_table

app = typer.Typer(no_args_is_help=True, help="Look at pipeline definitions.")


@app.command("list", epilog=help_examples("opd pipelines list"))
def list_shipped_pipelines() -> None:
    """List the shipped pipelines."""
    from opd.config import load_pipeline
    from pipelines.catalog import shipped_pipelines

    configs = {name: load_pipeline(path) for name, path in shipped_pipelines().items()}
    rows = [(name, str(c.student.model), str(len(c.domains)), str(c.trainer.steps)) for name, c in configs.items()]
    print_table("pipelines", ("name", "student", "domains", "steps"), rows)


@app.command(
    "show",
    epilog=help_examples("opd pipelines show quickstart > mine.yaml", "opd pipelines show quickstart --resolved"),
)
def show(
    pipeline: PipelineArgument,
    resolved: Annotated[bool, typer.Option("--resolved", help="With every default filled in.")] = False,
    overrides: SetOption = None,
) -> None:
    """Print a pipeline; copy it to a file to make your own."""
    from opd.config import load_pipeline
    from pipelines.catalog import find_pipeline

    path = find_pipeline(pipeline)
    config = load_pipeline(path, overrides)
    if resolved or overrides:
        import yaml

        typer.echo(yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False), nl=False)
    else:
        typer.echo(path.read_text(), nl=False)


@app.command("schema", epilog=help_examples("opd pipelines schema > opd-pipeline.schema.json"))
def schema() -> None:
    """Print the JSON Schema of a pipeline, for editors."""
    from opd.config import PipelineConfig

    typer.echo(json.dumps(PipelineConfig.model_json_schema(), indent=2))
