"""The command line. Each command has a module in `pipelines/commands/`; exit codes and errors are in its `shell.py`."""

from __future__ import annotations

from typing import Annotated

import typer

from opd import __version__
from pipelines.commands import (
    baselines,
    chat,
    check,
    demo,
    doctor,
    draft,
    environments,
    evaluate,
    experts,
    export,
    guard,
    indexers,
    init,
    merge,
    models,
    pipelines,
    plan,
    prompts,
    report,
    serve,
    shell,
    status,
    teachers,
    traces,
)

app = typer.Typer(
    cls=shell.ErrorExplainingGroup,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Merge many expert models into one by on-policy distillation.",
    epilog=shell.help_examples(
        "opd doctor",
        "opd demo",
        "opd merge quickstart",
        "opd merge --resume runs/quickstart",
        "opd --install-completion",
    ),
)
# The order is that of the help page.
for commands in (
    demo,
    init,
    merge,
    status,
    evaluate,
    check,
    plan,
    report,
    traces,
    baselines,
    export,
    serve,
    chat,
    doctor,
):
    app.add_typer(commands.app)
for name, group in (
    ("experts", experts),
    ("pipelines", pipelines),
    ("prompts", prompts),
    ("models", models),
    ("teachers", teachers),
    ("draft", draft),
    ("environments", environments),
    ("guard", guard),
    ("indexers", indexers),
):
    app.add_typer(group.app, name=name)


def _print_version(show: bool) -> None:
    if show:
        typer.echo(__version__)
        raise typer.Exit


@app.callback()
def main(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
    # `ErrorExplainingGroup` reads it by its name.
    debug: Annotated[
        bool, typer.Option(shell.DEBUG, envvar="OPD_DEBUG", help="Show the traceback of an error before its message.")
    ] = False,
) -> None:
    """Merge many expert models into one by on-policy distillation."""


if __name__ == "__main__":
    app()
