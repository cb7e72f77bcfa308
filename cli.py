"""The command line. Each command has a module in `pipelines/commands/`; exit codes and errors are in its `shell.py`."""

from __future__ import annotations

from typing import Annotated

import typer

from opd import __version__
from pipelines.commands import (
    baselines,
    check,
    environments,
    evaluate,
    experts,
    guard,
    merge,
    models,
    pipelines,
    prompts,
    report,
    shell,
    status,
    teachers,
    traces,
)

app = typer.Typer(
    cls=shell.EndsClearly,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Merge many expert models into one by on-policy distillation.",
)
for commands in (merge, status, evaluate, check, report, traces, baselines):
    app.add_typer(commands.app)
for name, group in (
    ("experts", experts),
    ("pipelines", pipelines),
    ("prompts", prompts),
    ("models", models),
    ("teachers", teachers),
    ("environments", environments),
    ("guard", guard),
):
    app.add_typer(group.app, name=name)


def _version(show: bool) -> None:
    if show:
        typer.echo(__version__)
        raise typer.Exit


@app.callback()
def main(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Merge many expert models into one by on-policy distillation."""


if __name__ == "__main__":
    app()
