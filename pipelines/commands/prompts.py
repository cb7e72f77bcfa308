"""The commands `opd prompts ...`, which make prompts of the shipped suites, and show those of a pipeline."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from pipelines.commands import completion
from pipelines.commands.shell import PipelineArgument, SetOption, help_examples, print_line, split_names

app = typer.Typer(no_args_is_help=True, help="Look at a pipeline's prompts, or make some for the shipped suites.")


@app.command(
    "make",
    epilog=help_examples(
        "opd prompts make letters --output prompts/letters",
        "opd prompts make reasoning --output prompts/reasoning --domains gcd,kin --train 500",
    ),
)
def make(
    suite: Annotated[
        str,
        typer.Argument(help="letters, agents, rewards, tools or reasoning.", autocompletion=completion.complete_suites),
    ],
    output: Annotated[Path, typer.Option(help="Directory; gets DOMAIN/train.jsonl and DOMAIN/eval.jsonl.")],
    domains: Annotated[str | None, typer.Option(help="Comma-separated; default: all of the suite.")] = None,
    train: Annotated[int, typer.Option(min=1, help="Training prompts per domain.")] = 2000,
    held_out: Annotated[int, typer.Option("--eval", min=1, help="Held-out prompts per domain.")] = 200,
    seed: Annotated[int, typer.Option(help="Decides which prompts.")] = 0,
) -> None:
    """Write a suite's prompts and answers, training and held-out apart."""
    from experts.suites import write_suite

    suite_domains = write_suite(suite, output, domains=split_names(domains), train=train, eval=held_out, seed=seed)
    typer.echo(f"{suite}: {len(suite_domains)} domains under {output}: {', '.join(suite_domains)}")


@app.command(
    "show", epilog=help_examples("opd prompts show mine.yaml", "opd prompts show mine.yaml --domain math -n 1")
)
def show(
    pipeline: PipelineArgument,
    domain: Annotated[str | None, typer.Option(help="Default: every domain.")] = None,
    count: Annotated[int, typer.Option("-n", min=0, help="Prompts to show of each source.")] = 3,
    overrides: SetOption = None,
) -> None:
    """Show prompts as the student reads them, their token ids, and how many are left out and why."""
    from opd.config import load_pipeline
    from pipelines.catalog import find_pipeline

    config = load_pipeline(find_pipeline(pipeline), overrides)
    from pipelines.inputs.show_prompts import show_prompts

    for line in show_prompts(config, domain, count):
        print_line(line, err=False)
