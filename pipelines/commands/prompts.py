"""`opd prompts ...`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from pipelines.commands.shell import split

app = typer.Typer(no_args_is_help=True, help="Make prompts for the shipped task suites.")


@app.command("make")
def make(
    suite: Annotated[str, typer.Argument(help="letters or reasoning.")],
    output: Annotated[Path, typer.Option(help="Directory; gets DOMAIN/train.jsonl and DOMAIN/eval.jsonl.")],
    domains: Annotated[str | None, typer.Option(help="Comma-separated; default: all of the suite.")] = None,
    train: Annotated[int, typer.Option(min=1, help="Training prompts per domain.")] = 2000,
    held_out: Annotated[int, typer.Option("--eval", min=1, help="Held-out prompts per domain.")] = 200,
    seed: int = 0,
) -> None:
    """Write a suite's prompts and answers, training and held-out apart."""
    from experts.suites import write_suite

    written = write_suite(suite, output, domains=split(domains), train=train, eval=held_out, seed=seed)
    typer.echo(f"{suite}: {len(written)} domains under {output}: {', '.join(written)}")
