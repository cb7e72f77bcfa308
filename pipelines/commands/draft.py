"""The commands `opd draft ...`, which train a draft for speculative decoding."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from pipelines.commands import completion
from pipelines.commands.shell import ModelArgument, SetOption, help_examples, print_line

app = typer.Typer(no_args_is_help=True, help="Train a draft, with which a model writes faster.")


@app.callback()
def draft() -> None:
    """A group of one command stays a group."""


@app.command(
    "train",
    epilog=help_examples(
        "opd draft train runs/quickstart",
        "opd draft train models/mine --pipeline quickstart --output drafts/mine --set draft.loss=end_to_end_tv",
    ),
)
def train(
    model: ModelArgument,
    pipeline: Annotated[
        str | None,
        typer.Option(
            help="Whose prompts the model answers. Default: those of the run that left it.",
            autocompletion=completion.complete_pipelines,
        ),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Default: `draft` in the model's directory, where opd serve looks."),
    ] = None,
    samples: Annotated[int, typer.Option(min=20, help="Texts that the model writes to learn from.")] = 512,
    steps: Annotated[int, typer.Option(min=1, help="Optimiser steps.")] = 400,
    batch_size: Annotated[int, typer.Option(min=1, help="Texts of a step.")] = 16,
    overrides: SetOption = None,
) -> None:
    """Train a draft for a finished model, which stays as it is. A merge with a section `draft` trains one on the way."""
    from opd.config import load_pipeline, load_run_pipeline
    from opd.errors import ConfigError
    from opd.records.step import DRAFT
    from opd.run.paths import RunPaths
    from pipelines.after.models import find_model
    from pipelines.catalog import find_pipeline

    local_model = find_model(model, print_line)
    if pipeline is None and local_model.config is None:
        raise ConfigError.at(
            "--pipeline",
            found=f"none, and {model} was left by no run",
            wanted="the pipeline whose prompts the model is to answer",
            fix="name one: a file, or a name that `opd pipelines list` shows",
        )
    if pipeline:
        config = load_pipeline(find_pipeline(pipeline), overrides)
    else:
        config = load_run_pipeline(RunPaths(model).pipeline, overrides)
    from pipelines.after.draft import DraftTraining, train_model_draft

    target = output or local_model.path / DRAFT
    training = DraftTraining(samples=samples, steps=steps, batch=batch_size)
    numbers = train_model_draft(local_model, config, training, target, print_line)
    print_line(f"accepted length {numbers['accepted_length']:.2f} tokens a pass on texts that were held out", err=False)
    print_line(f"{target}; next: opd serve {model}", err=False)
